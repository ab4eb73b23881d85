"""The dense part on an NVIDIA GPU: Paddle's programs run by kernels of our own. README.md says how and why."""
