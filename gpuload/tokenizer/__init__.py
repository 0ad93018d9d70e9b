"""A tokenizer: what it does by definition (reference.py) and how the host does it fast (host.py)."""
