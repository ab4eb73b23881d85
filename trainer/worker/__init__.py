"""A trainer's Paddle process: restore, epochs, days, checkpoints, evaluations."""
