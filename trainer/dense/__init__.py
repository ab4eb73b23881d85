"""The dense part as static programs, on a CPU or a GPU."""
