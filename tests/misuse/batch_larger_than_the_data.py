"""Batches of more rows than there are, and incomplete ones dropped."""

import gpuload

gpuload.load("prompts.parquet", "tokenizer").loader(batch_size=1000, drop_last=True)

# OptionError: drop_last leaves no batch: 4 rows, world_size=1, batch_size=1000
