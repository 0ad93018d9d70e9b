"""Prompts in a column of another name."""

import gpuload

gpuload.load("questions.jsonl", "tokenizer")

# DataError: questions.jsonl: no column 'prompt': did you mean prompt_key='question'? The columns are question
