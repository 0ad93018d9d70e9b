"""Makes a torchvision that is built for CUDA importable next to a torch without: defines the two operators that its
library would. No processor of images calls them. To be imported before transformers."""

from importlib.util import find_spec
from typing import Any

import torch

_defined: list[Any] = []  # removed with their library

if find_spec("torchvision") is not None and not torch.version.cuda:
    _defined.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _defined[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
