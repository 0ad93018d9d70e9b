"""`dataclass`, in a third of the time: to decorate the classes of a load took as long as a hundred rows.

The standard decorator compiles up to six functions for each class, this one only `__init__`. For type checkers it is
the standard one. They alone find assignments to the fields of frozen classes.
"""

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, **options):
        """As `dataclasses.dataclass`."""

        def decorated(cls):
            own = vars(cls)
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if eq and "__eq__" not in own:
                if "__hash__" not in own:
                    cls.__hash__ = _hash if frozen else None
                cls.__eq__ = _equal
            cls = dataclasses.dataclass(cls, repr=False, eq=False, **options)
            names = [field.name for field in dataclasses.fields(cls) if field.compare]
            cls._compared = attrgetter(*names) if names else _nothing
            return cls

        return decorated if cls is None else decorated(cls)


def _nothing(record: Any) -> tuple[()]:
    return ()


def _equal(self: Any, other: Any) -> bool:
    kind = type(self)
    return kind._compared(self) == kind._compared(other) if type(other) is kind else NotImplemented


def _hash(self: Any) -> int:
    return hash(type(self)._compared(self))


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
