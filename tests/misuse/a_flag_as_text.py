"""A text such as "false" would mean yes."""

import gpuload

prompts = gpuload.load("prompts.parquet", "tokenizer")
prompts.loader(batch_size=2, shuffle="false")

# OptionError: shuffle='false': expected True or False
