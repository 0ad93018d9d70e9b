"""The engine without a GPU: Arrow columns, a compiled tokenizer, NumPy batches."""
