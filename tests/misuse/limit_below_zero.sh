# A limit that no row can be within.
gpuload check prompts.parquet --tokenizer tokenizer --limit -3
# exit 1: gpuload: --limit -3: expected an integer > 0, or None
