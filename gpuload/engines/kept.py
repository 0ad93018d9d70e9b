"""An engine for many small loads with one tokenizer, such as the batches of a stream.

Making one takes as long as a thousand rows: the template is traced, and an encoder has to be accepted. It is used again
only while everything that went into it is the same, which is looked at for each load:

- the tokenizer is the same object, of the same class, with the same template and special tokens; its backend has the
  same added tokens and the same settings of every part (`backends.settings`);
- its vocabulary and merges, which take a tenth of a second to compare, are not in the engine: its encoder asks the
  tokenizer's object (`HostEncoder.live`), and entries of its table of bytes are compared for the ids of each load
  (`TokenSpans.again`).

Rows of each load are compared with the tokenizer as always.
"""

import os
from typing import Any

from gpuload.core.options import Options
from gpuload.engines.choose import EngineBuilder
from gpuload.engines.host.encode import tokenizer_state
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import Engine
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import contains_randomness, tells_time

_MOST_LOADS = 256
"""After so many loads, an engine is made again: it keeps what it has learned of all rows."""


class KeptEngine:
    """Builds engines as another `EngineBuilder` does, and gives them to later loads as well."""

    def __init__(self, build: EngineBuilder):
        self._build = build
        self._engine: HostEngine | None = None
        self._state: tuple[Any, ...] | None = None
        self._tokenizer: Any = None
        self._loads = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptEngine, (self._build,)  # copies and other processes make their own

    def __call__(self, options: Options, reference: Reference, exact_only: bool) -> Engine:
        state = _state_of(options, reference, exact_only)
        same = state is not None and state == self._state and reference.tokenizer is self._tokenizer
        if same and self._engine is not None and self._loads < _MOST_LOADS and self._engine.again():
            self._loads += 1
            return self._engine
        engine = self._build(options, reference, exact_only)
        engine.loading()  # more than the rows of this load, however few they are
        self._engine = engine if isinstance(engine, HostEngine) else None
        self._state, self._tokenizer, self._loads = state, reference.tokenizer, 1
        return engine


def _state_of(options: Options, reference: Reference, exact_only: bool) -> tuple[Any, ...] | None:
    """What an engine is made of, except for vocabulary and merges; None if they are in it, or time or chance are."""
    template = reference.template_text
    state = tokenizer_state(reference)
    if exact_only or state is None or contains_randomness(template) or tells_time(template):
        return None
    return os.getpid(), options.device, reference.settings(), reference.variant, state
