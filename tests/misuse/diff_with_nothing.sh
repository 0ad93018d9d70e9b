# Nothing to compare with.
gpuload diff chats.jsonl --tokenizer tokenizer
# exit 2: gpuload diff: error: pass --against-tokenizer, --against-template or --against-template-kwargs
