"""The tokenizer object that defines every token, and its chat template call."""
