# Prompts and pairs in one command.
gpuload inspect prompts.parquet pairs.jsonl --tokenizer tokenizer
# exit 1: gpuload: files hold different things (prompts in prompts.parquet, pairs in pairs.jsonl): inspect them
# separately, or pass --as
