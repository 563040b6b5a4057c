"""Checkpoints: what they hold, what is refused, and trainings that go on from them."""

import pytest

pytest.importorskip("xxhash", reason="a checkpoint needs xxhash: pip install 'pdlcheck[checkpoint]'")
