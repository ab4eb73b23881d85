"""Parameter servers: Paddle's sparse tables behind a typed description, a client that never returns garbage, and checkpoints."""
