"""The number of a column instead of its name."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.to_arrow(columns=[1])

# OptionError: columns: 1 is not a column that can be passed through...
