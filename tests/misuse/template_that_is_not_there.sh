# A template that is not there.
gpuload diff chats.jsonl --tokenizer tokenizer --against-template fixed.jinja
# exit 1: gpuload: --against-template fixed.jinja: no such file: check the path
