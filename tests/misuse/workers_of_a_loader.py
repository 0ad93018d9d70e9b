"""An option of PyTorch's DataLoader."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.loader(batch_size=2, num_workers=4)

# OptionError: loader: unknown option num_workers...; expected one of ...drop_last, ...
