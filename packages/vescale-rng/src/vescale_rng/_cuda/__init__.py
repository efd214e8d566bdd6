"""What CUDA's random operators draw: GPU models, their kernels on any device, sources of real and emulated draws."""
