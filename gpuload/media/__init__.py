"""Images of prompts: their sizes, and what a processor makes of sizes."""

from typing import Literal

CheckMedia = Literal["header", "tail", "decode"]

MOST_PIXELS = 178_956_970
"""Pixels from which Pillow refuses an image as a decompression bomb."""

IMAGES = ".images"
"""How the names of files end that hold copies of images for later loads."""
