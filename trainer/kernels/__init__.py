"""Operators without training: C++ on the CPU, CUDA on the GPU."""
