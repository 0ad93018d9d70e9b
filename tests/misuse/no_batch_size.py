"""A loader of chats without a size of batches."""

import gpuload

gpuload.load_chats("chats.jsonl", "tokenizer").loader()

# OptionError: loader: pass batch_size, or max_tokens
