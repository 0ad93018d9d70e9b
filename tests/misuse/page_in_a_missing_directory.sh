# A page in a directory that is not there.
gpuload check chats.jsonl --tokenizer tokenizer --html pages/check.html
# exit 1: gpuload: --html pages/check.html: no such directory: pages
