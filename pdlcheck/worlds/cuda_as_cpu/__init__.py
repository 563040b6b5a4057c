"""The option to run CUDA code of ranks on the CPU: devices are names, and CPU tensors remember their device."""
