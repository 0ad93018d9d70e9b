"""A row that is too long, and must not be truncated."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer", max_prompt_length=4, filter_overlong_prompts=False)
prompts[0]

# PromptTooLongError: row 0 (prompts.parquet row 0) has 23 tokens, which exceeds max_prompt_length=4: raise
# max_prompt_length, set truncation to 'left', 'right' or 'middle', or set filter_overlong_prompts=True
