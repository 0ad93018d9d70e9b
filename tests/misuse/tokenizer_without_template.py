"""Messages, and a tokenizer without a chat template."""

import gpuload

gpuload.load("prompts.parquet", "plain_tokenizer")

# TokenizerError: tokenizer plain_tokenizer has no usable chat template (...): pass the text of one as
# chat_template=..., or chat_template=None if the prompts are plain strings
