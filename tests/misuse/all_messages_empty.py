"""Conversations without a message in any row."""

import pyarrow as pa

import gpuload

gpuload.load_chats(pa.table({"messages": [[], [], []]}), "tokenizer")

# DataError: Table: column 'messages' is null or empty in all rows: there is nothing to load
