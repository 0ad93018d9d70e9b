"""A mask instead of row numbers."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.batch([True, False])

# TypeError: [True, False] are not the numbers of rows: pass a sequence of integers, of a mask np.flatnonzero(mask)
