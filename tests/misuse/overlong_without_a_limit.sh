# What becomes of long rows, without a limit.
gpuload check chats.jsonl --tokenizer tokenizer --overlong keep_start
# exit 1: gpuload: --overlong keep_start: pass --limit, too: without one, no row is too long
