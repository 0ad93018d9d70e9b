"""A directory that is there, and was not made by gpuload."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
gpuload.save_to_disk({"train": chats}, "tokenizer")

# OptionError: .../tokenizer exists and was not written by gpuload: choose another directory
