"""A kind of data that is called otherwise."""

import gpuload

gpuload.check("chats.jsonl", "tokenizer", kind="sft")

# OptionError: kind='sft': expected one of 'prompts', 'chats', 'pairs'
