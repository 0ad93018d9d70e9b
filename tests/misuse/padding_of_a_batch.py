"""The side of the padding instead of its width."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.batch([0, 1], padding="left")

# OptionError: padding='left': expected one of 'max_length', 'longest'
