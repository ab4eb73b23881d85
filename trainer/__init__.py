"""Trainers: the job file, the models, the training step, and the coordinator that decides who runs."""
