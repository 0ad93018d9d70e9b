"""A file that is not there."""

import gpuload

gpuload.load("promts.parquet", "tokenizer")

# SourceError: promts.parquet: no file matches in ..., which has broken.jsonl, chats.jsonl, labels.jsonl,
# lines.parquet, pairs.jsonl
