"""The result of a load: rows, columns, where they come from, and the order in which a loader gives them."""

from gpuload._moved import old_names

__getattr__ = old_names("gpuload.dataset", "gpuload.kinds.prompts")
