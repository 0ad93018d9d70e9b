"""No names of columns."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.take(None)

# OptionError: take: expected a list of column names, such as [...]
