"""The ``paddlewheel`` command."""
