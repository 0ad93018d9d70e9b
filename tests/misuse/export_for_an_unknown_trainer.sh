# Pairs for a trainer that reads none.
gpuload prepare pairs.jsonl --tokenizer tokenizer --export dpo out --for megatron
# exit 2: gpuload prepare: error: --for megatron: --export dpo is for trl, llamafactory
