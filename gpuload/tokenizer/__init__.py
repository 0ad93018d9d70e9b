"""The tokenizer compiler: turns a byte-pair tokenizer into tables that kernels can run.

Input is the JSON of a `tokenizers.Tokenizer`. The modules, in the order of the work:

    spec.py           the tokenizer as plain data (`BpeSpec`), or one sentence why it is not supported
    regex.py          parses the split regex
    classes.py        partitions Unicode into the classes that the regex distinguishes
    splitter.py       the split regex as DFAs over these classes
    added_tokens.py   added tokens as a trie
    nfc.py            tables for a quick check of normal form C
    merges.py         vocabulary and merges as hash tables (hash_tables.py)
    fallback.py       the same for tokenizers that merge characters, with byte fallback
    compiled.py       all of these together: `compile_tokenizer`
    token_bytes.py    the bytes of each token, for loss masks
    tables.py         a cache on disk for tables that take seconds to build

The device engine runs the tables (`gpuload.engines.device.encode`); `tests/simulator/encoder.py` does the same in plain
Python.
"""
