"""A file of another kind."""

import gpuload

gpuload.load("notes.txt", "tokenizer")

# SourceError: notes.txt: unknown file extension '.txt': gpuload reads .parquet, .json, .jsonl, .arrow
