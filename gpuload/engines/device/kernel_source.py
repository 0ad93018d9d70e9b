"""The kernels' source, and the parameters of each kernel, which are parsed from it."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

FILES = (
    "common.cuh text.cuh scan.cuh gather.cu strings.cu shapes.cu pad.cu pack.cu pairs.cu answers.cu added.cu "
    "normal_form.cu rewrite.cu split.cu words.cu merges.cu merges_long.cu tiles.cu ids.cu"
).split()

_TYPES = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "u16": np.uint16, "u8": np.uint8, "bool": np.bool_}
_TYPES |= {"float": np.float32}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str  # as in the source
    dtype: np.dtype[Any]  # type of the number, or of the array's items
    is_array: bool  # whether the parameter is a pointer


@cache
def source() -> str:
    """Return all kernels as one CUDA C++ source. `#line` makes compilers report the files' own line numbers.

    Parameters are not `__restrict__`: with it, `copy_pieces` needs 40 registers instead of 32 for compute capability
    9.0, and `merge_long` 56 instead of 48 for 12.0. Whether it gains more than that, only a GPU can tell.
    """
    directory = resources.files("gpuload.engines.kernels")
    return "".join(f'#line 1 "{name}"\n{(directory / name).read_text()}' for name in FILES)


@cache
def signatures() -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel by its name."""
    return parsed(source())


def parsed(text: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel in a source by its name."""
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', text)
    return {name: tuple(map(_parameter, parameters.split(","))) for name, parameters in kernels}


def _parameter(declaration: str) -> Parameter:
    kind, pointer, name = re.fullmatch(r"\s*(?:const )?(\w+)\s*(\*?)\s*(\w+)\s*", declaration).groups()  # type: ignore[union-attr]
    return Parameter(name, np.dtype(_TYPES[kind]), bool(pointer))
