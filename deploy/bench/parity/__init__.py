"""Proof that distribution costs no accuracy: the same job in one process and in many, seed by seed."""
