"""For tests and benchmarks: kernels on a machine without a GPU, and loads by an engine of the caller's choice."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpuload.core.files import cache_root
from gpuload.core.options import Options
from gpuload.engines.choose import EngineBuilder
from gpuload.engines.device.engine import DeviceEngine, Reader
from gpuload.engines.device.kernels import Kernels
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import PromptDataset, PromptKind
from gpuload.kinds.training_device import DeviceTrainingEngine
from gpuload.pipeline.run import load_given
from gpuload.reference.reference import Reference


def engine_on(
    kernels: Kernels, reader: Reader | None = None, make: Callable[..., DeviceEngine] = DeviceEngine
) -> EngineBuilder:
    """What makes the device engine on the given kernels, for `load_with`.

    Args:
        kernels: for any device, also for the host.
        reader: as for `DeviceEngine`.
        make: its class, or what makes one of it.
    """

    def build(options: Options, reference: Reference, exact_only: bool = False) -> DeviceEngine:
        where = torch.device(kernels.device)
        return make(kernels, where, reference, exact_only, reader, options.tokens_on)

    return build


def load_with(build_engine: EngineBuilder, files: Any, tokenizer: Any, **options: Any) -> PromptDataset:
    """`gpuload.load` by another engine than the one that `device` names.

    Args:
        build_engine: makes the engine from options, reference and whether the tokenizer itself must do everything.
        files, tokenizer, **options: as for `gpuload.load`.
    """
    return load_given(PromptKind, files, tokenizer, options, build_engine)


def load_chats_with(
    kernels: Kernels, files: Any, tokenizer: Any, reader: Reader | None = None, **options: Any
) -> ChatDataset:
    """`gpuload.load_chats` by the device engine on the given kernels.

    Args:
        kernels, reader: as for `engine_on`.
        files, tokenizer, **options: as for `gpuload.load_chats`.
    """
    return load_given(
        ChatKind,
        files,
        tokenizer,
        options,
        engine_on(kernels, reader, partial(DeviceTrainingEngine, host_engine=ChatEngine)),
    )


def load_pairs_with(
    kernels: Kernels, files: Any, tokenizer: Any, reader: Reader | None = None, **options: Any
) -> PairDataset:
    """`gpuload.load_pairs` by the device engine on the given kernels.

    Args:
        kernels, reader: as for `engine_on`.
        files, tokenizer, **options: as for `gpuload.load_pairs`.
    """
    return load_given(
        PairKind,
        files,
        tokenizer,
        options,
        engine_on(kernels, reader, partial(DeviceTrainingEngine, host_engine=PairEngine)),
    )


def link_slow_caches(directory: Path) -> str:
    """Link the demo's tokenizer and the tokenizer tables of the user's cache, which take seconds to make.

    Args:
        directory: a new cache directory, which otherwise stays empty.

    Returns:
        The directory, for `$GPULOAD_CACHE`.
    """
    for name in ("demo", "tables"):
        (cache_root() / name).mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to((cache_root() / name).resolve())
    return str(directory)
