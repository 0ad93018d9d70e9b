"""A line that is no JSON."""

import gpuload

gpuload.load("broken.jsonl", "tokenizer")

# SourceError: broken.jsonl, line 2: not valid JSON: Expecting ',' delimiter: line 1 column 15 (char 14)
