"""A split whose name is a number."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
gpuload.save_to_disk({1: chats}, "out")

# OptionError: split 1: expected letters, digits, underscores and single dots
