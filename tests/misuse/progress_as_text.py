"""A text such as "no" would mean yes."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", progress="no")

# OptionError: progress='no': expected True or False, or None
