"""Answers with labels of good and bad ones, loaded for SFT."""

import gpuload

gpuload.load_chats("labels.jsonl", "tokenizer")

# DataError: labels.jsonl: column 'label' says which answers are good ones, as in data for KTO: use load_pairs, or
# pass format='messages' to train on all answers, also on bad ones
