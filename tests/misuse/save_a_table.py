"""Rows that were not loaded."""

import gpuload

gpuload.save_to_disk({"train": [{"input_ids": [1]}]}, "out")

# OptionError: split 'train' is a list: expected what load_chats or load_pairs returns
