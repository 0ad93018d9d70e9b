"""A tokenizer.

What it does by definition: call.py (a template and its constants), reference.py. How the host does it fast: host.py.
How a device will: spec.py (what it is), splitter.py (split regex → DFA), merges.py (vocabulary and merges as tables),
twin.py (the encoder over those tables, in plain Python).
"""
