"""From the raw files of public data sets, or any delimited text, to Parquet."""
