"""A misspelt option."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", max_promt_length=512)

# OptionError: unknown option max_promt_length: did you mean max_prompt_length?
