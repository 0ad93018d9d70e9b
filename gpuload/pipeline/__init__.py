"""A load, whatever its rows are for: `run.py` is the page to read first."""
