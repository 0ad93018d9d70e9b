"""From a column of prompts to a column of text."""

from gpuload.template.rows import Rendered, render_rows

__all__ = ["Rendered", "render_rows"]
