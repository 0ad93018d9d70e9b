"""A row that is not there."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer")[1000]

# IndexError: index 1000 is out of range for a dataset with 4 rows
