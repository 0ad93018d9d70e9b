"""Prompts with images, for a processor of a vision model."""
