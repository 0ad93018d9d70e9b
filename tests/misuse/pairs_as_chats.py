"""Pairs, loaded as conversations."""

import gpuload

gpuload.load_chats("pairs.jsonl", "tokenizer")

# DataError: pairs.jsonl: preference data, with columns chosen and rejected: use load_pairs, or pass format= to
# train on the other columns as they are
