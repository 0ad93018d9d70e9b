"""Paths, globs, URLs and frames → Arrow tables."""
