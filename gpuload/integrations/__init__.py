"""Integrations with trainers. Each subpackage is imported only by users of that trainer."""
