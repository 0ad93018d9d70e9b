"""The tokens of a pack as text."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
chats.loader(batch_size=1, packing="bfd", pack_length="64")

# OptionError: pack_length='64': expected an integer of at least 1
