"""A dataset without the name of its split."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
gpuload.save_to_disk(chats, "out")

# OptionError: splits is a ChatDataset: pass datasets by name, such as {'train': dataset}
