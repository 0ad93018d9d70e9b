"""What a dataset contains: numbers, rows as tokens, a page."""
