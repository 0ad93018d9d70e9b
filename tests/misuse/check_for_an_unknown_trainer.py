"""A trainer whose configuration is not known."""

import gpuload

gpuload.check("chats.jsonl", "tokenizer", trainer="axolotl")

# OptionError: trainer='axolotl': expected one of 'verl', 'trl', 'slime', 'nemo-rl'
