"""The parts of `python ci/inject_training_faults.py`."""
