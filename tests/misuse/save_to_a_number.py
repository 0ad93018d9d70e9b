"""No directory."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
gpuload.save_to_disk({"train": chats}, 5)

# OptionError: directory=5: expected a path
