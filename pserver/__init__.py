"""Sparse tables on Paddle's parameter servers. See README.md."""
