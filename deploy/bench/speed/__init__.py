"""Benchmarks: how fast, on what machine, next to what else, and what would be possible. `paddlewheel bench` runs them.

Every figure comes from processes started for it and watched from outside (`watch`), is repeated in turns with the other
figures of the report, and is told as median and range with the machine, versions and settings (`report`).
"""
