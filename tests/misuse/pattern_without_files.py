"""A pattern that no file has."""

import gpuload

gpuload.load("train/*.parquet", "tokenizer")

# SourceError: train/*.parquet: no file matches: no such directory: train
