# Conversations without a chat template.
gpuload inspect chats.jsonl --tokenizer tokenizer --no-template
# exit 1: gpuload: --no-template is for prompts: conversations are rendered by a chat template. Remove it
