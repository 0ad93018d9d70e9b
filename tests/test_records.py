"""Classes of `core.records` are those of `dataclasses`, but for assignments to frozen fields."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gpuload.core import records

KINDS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"eq": False},
    {"frozen": True, "eq": False},
    {"repr": False},
    {"frozen": True, "kw_only": True},
]


def classes(decorator: Callable[..., Any], options: dict[str, Any]) -> tuple[Any, Any]:
    @decorator(**options)
    class Base:
        number: int
        names: tuple[str, ...] = ()
        cached: Any = dataclasses.field(default=None, compare=False, repr=False)

    @decorator(**options)
    class Below(Base):
        more: Any = dataclasses.field(default_factory=str)

        def __post_init__(self) -> None:
            object.__setattr__(self, "cached", len(self.names))

    return Base, Below


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_as_the_standard_decorator(options: dict[str, Any]) -> None:
    ours, theirs = (classes(each, options) for each in (records.dataclass, dataclasses.dataclass))
    for own, known in zip(ours, theirs, strict=True):
        assert [field.name for field in dataclasses.fields(own)] == [field.name for field in dataclasses.fields(known)]
        a, b, c = own(number=1), own(number=1, names=("x",)), own(number=1)
        x, y, z = known(number=1), known(number=1, names=("x",)), known(number=1)
        assert [a == c, a == b, a == x, a != c] == [x == z, x == y, x == a, x != z]
        assert (own.__hash__ is None) == (known.__hash__ is None)
        if known.__hash__ is not None:
            assert (hash(a) == hash(c)) == (hash(x) == hash(z))
        if options.get("repr", True):
            assert repr(b) == repr(y)
        else:
            assert repr(b).startswith("<")
        assert dataclasses.asdict(b) == dataclasses.asdict(y)
        assert dataclasses.replace(b, number=2).number == 2
        assert vars(copy.copy(b)) == vars(copy.copy(y))
        with pytest.raises(TypeError):
            own(numbr=1)


def test_what_a_class_defines_is_kept() -> None:
    @records.dataclass(frozen=True)
    class Own:
        number: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    assert Own(1) == Own(2)
    assert (hash(Own(1)), repr(Own(1))) == (7, "own")


@records.dataclass(frozen=True)
class Pickled:
    number: int
    other: "Pickled | None" = None


def test_pickled_and_without_fields() -> None:
    given = Pickled(1, Pickled(2))
    assert pickle.loads(pickle.dumps(given)) == given
    assert len({given, Pickled(1, Pickled(2)), Pickled(1)}) == 2
    assert given != 1

    @records.dataclass(frozen=True)
    class Nothing:
        pass

    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert repr(Nothing()).endswith("Nothing()")
