"""A plugin for pytest (`-p on_torchvision`): processors have the image processors that need torchvision.

The torchvision on PyPI is built for CUDA. It can be imported next to a torch without, if somebody defines the two
operators that its library would; no processor of images calls them.
"""

import os
import sys
from typing import Any

import pytest
import torch

_defined: list[Any] = []  # removed with the library object


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("GPULOAD_TORCHVISION"):
        sys.path.append(folder)
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _defined.append(library)
    import torchvision  # noqa: F401
