"""Conversations, loaded as pairs."""

import gpuload

gpuload.load_pairs("chats.jsonl", "tokenizer")

# DataError: chats.jsonl: not a known format. The columns are messages (list<item: struct<role: string, content:
# string>>); the closest format is preference, which has chosen and rejected and prompt (chosen and rejected and
# prompt missing): rename the columns, or pass prompt_key=, chosen_key= and so on
