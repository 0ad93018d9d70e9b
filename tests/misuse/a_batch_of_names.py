"""Keys of a row instead of rows."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
gpuload.collate_fn(prompts[0])

# OptionError: collate_fn: expected a list of rows, not of str
