"""What is asked of a run: the job file, its sections and its errors."""
