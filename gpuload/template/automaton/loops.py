"""The variable `loop` of loops over the lists of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuload.template.automaton.nodes import Affine
from gpuload.template.automaton.recorder import Recorder
from gpuload.template.automaton.symbols import SymbolicList
from gpuload.template.automaton.values import Range, SymbolicNumber
from gpuload.template.symbol import reject


class Loop:
    """The variable `loop` of a loop over a symbolic list."""

    def __init__(self, recorder: Recorder, over: SymbolicList | Range, undefined: Any) -> None:
        self._recorder, self._over, self._undefined = recorder, over, undefined

    def __iter__(self) -> Iterator[tuple[Any, Loop]]:
        name = self._recorder.enter()
        self.index0 = SymbolicNumber(self._recorder, Affine.of(("register", name)))
        self.length = SymbolicNumber(self._recorder, self._over.length)
        self.index = self.index0 + 1
        self.revindex0, self.revindex = self.length - self.index, self.length - self.index0
        for item in self._recorder.passes(name, self._over):
            yield item, self

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        return self.index == self.length

    @property
    def previtem(self) -> Any:
        return (
            self._undefined("there is no previous item") if self.first else self._over.element((self.index0 - 1).affine)
        )

    @property
    def nextitem(self) -> Any:
        return self._undefined("there is no next item") if self.last else self._over.element(self.index.affine)

    def cycle(self, *values: Any) -> Any:
        number = self.index0 % len(values)
        return next(value for k, value in enumerate(values) if number == k)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reject(f"uses loop.{name}")
