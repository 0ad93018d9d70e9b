"""An argument of the template that the loader sets."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", apply_chat_template_kwargs={"tokenize": False})

# OptionError: apply_chat_template_kwargs.tokenize is set by the loader: remove it
