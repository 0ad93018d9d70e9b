"""Datasets without the names of splits."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
gpuload.save_to_disk([chats], "out")

# OptionError: splits is a list: pass datasets by name, such as {'train': dataset}
