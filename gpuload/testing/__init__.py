"""For tests and benchmarks: kernels on a machine without a GPU, and loads by an engine of the caller's choice."""

import time
from typing import Any

from gpuload.dataset import PromptDataset
from gpuload.load import EngineBuilder, load_sources, open_sources
from gpuload.options import Options


def load_with(build_engine: EngineBuilder, files: Any, tokenizer: Any, **options: Any) -> PromptDataset:
    """`gpuload.load` by another engine than the one that `device` names.

    Args:
        build_engine: makes the engine from options, reference and whether the tokenizer itself must do everything.
        files, tokenizer, **options: as for `gpuload.load`.
    """
    started = time.perf_counter()
    chosen = Options.parse(options)
    return load_sources(open_sources(files, chosen), tokenizer, chosen, started, build_engine=build_engine)
