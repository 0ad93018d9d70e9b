"""A text such as "no" would mean yes."""

import gpuload

chats = gpuload.load_chats("chats.jsonl", "tokenizer")
chats.loader(batch_size=2, group_by_length="no")

# OptionError: group_by_length='no': expected True or False
