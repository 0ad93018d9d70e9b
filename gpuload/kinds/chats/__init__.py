"""Data for SFT: conversations, prompts with completions, and texts, tokenized with a loss mask."""
