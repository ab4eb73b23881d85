"""Parquet -> checked, deterministic, exactly-once batches of keys and numbers."""

from paddlewheel.data_pipeline.errors import DataError

__all__ = ["DataError"]
