"""A tokenizer that is not there."""

import gpuload

gpuload.load("prompts.parquet", "./tokeniser")

# TokenizerError: tokenizer './tokeniser': no such directory: check the path
