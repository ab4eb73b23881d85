"""From Parquet files to batches: schema, plan, keys, transforms and the loader."""
