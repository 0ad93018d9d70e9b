"""A limit that no row keeps."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", max_prompt_length=4)

# NoRowsError: all 4 rows were dropped overlong 4 rows exceed max_prompt_length=4; the shortest has 23 tokens: raise
# max_prompt_length
