"""LazyDict: a batch whose Python objects are made when they are first read."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    """A value that has not been read yet.

    Attributes:
        make: makes the value.
    """

    make: Callable[[], Any]

    def __repr__(self) -> str:
        return "<not read yet>"


class LazyDict(UserDict[str, Any]):
    """A mapping like a dict. Values given as `Later` are made when they are first read, and then kept.

    Examples:
        >>> batch = LazyDict(a=1, b=Later(lambda: [2]))
        >>> batch["b"], dict(batch)
        ([2], {'a': 1, 'b': [2]})
    """

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, Later):
            value = self.data[key] = value.make()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as values: what makes them may need a GPU."""
        return LazyDict, (dict(self),)
