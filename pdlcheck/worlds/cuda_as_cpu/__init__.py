"""CUDA code of ranks on the CPU: its devices are names, its tensors are CPU tensors that remember their device."""
