"""Trains click-through-rate models with huge embedding tables on Paddle's parameter server."""
