"""A number as text."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", max_prompt_length="512")

# OptionError: max_prompt_length='512': expected an integer > 0, got a string
