"""Token ids on disk, so that a second load of the same prompts tokenizes nothing."""
