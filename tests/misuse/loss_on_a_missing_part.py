"""Loss on the completion, in data without one."""

import gpuload

gpuload.load_chats("chats.jsonl", "tokenizer", loss_on="completion")

# OptionError: loss_on='completion': data in the format messages has no such part: use one of 'assistant', 'last',
# 'all', 'marked'
