"""An argument of the template whose name is a number."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", apply_chat_template_kwargs={1: True})

# OptionError: apply_chat_template_kwargs: 1 is not the name of an argument: expected a string
