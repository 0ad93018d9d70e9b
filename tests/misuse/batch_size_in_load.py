"""The size of batches belongs to the loader."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer", batch_size=8)

# OptionError: ...batch_size...
