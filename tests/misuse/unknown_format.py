"""A format that does not exist."""

import gpuload

gpuload.load_chats("chats.jsonl", "tokenizer", format="sharegbt")

# OptionError: format='sharegbt': did you mean sharegpt?
