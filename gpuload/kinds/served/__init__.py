"""Rows as served: each answer of a conversation behind the prompt that inference would have."""
