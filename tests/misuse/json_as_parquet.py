"""JSON lines with the name of a parquet file."""

import gpuload

gpuload.load("lines.parquet", "tokenizer")

# SourceError: lines.parquet: not a parquet file: it starts with b'{"me'
