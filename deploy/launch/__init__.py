"""Starts a job's processes, here or over a list of machines, and shows how it goes."""
