"""Arrays with CuPy's rules in host memory: they cannot be combined with NumPy arrays, and every wait is counted.

On NumPy arrays, the device engine passes its tests even where it mixes host and device memory; a GPU would then raise a
TypeError or read a wrong address. `StrictKernels` runs the kernels of the host on arrays of a class of its own:

    kernels = StrictKernels()
    there = kernels.xp.asarray(np.arange(3))
    there + np.arange(3)                    # TypeError, as for CuPy
    int(there[0]), kernels.xp.waits         # (0, 1): the host waits for a value

Like CuPy's, these arrays have no implicit conversion to NumPy arrays; a single item is an array without dimensions; and
`get`, `tolist` and conversions to Python numbers wait for the device. So do operations whose result has a size that
depends on values: `flatnonzero`, `unique`, `bincount`, selection by a mask, `repeat` with a count per item. Stricter
than CuPy's, they do not take part in NumPy's functions.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpuload.core.arrays import Array
from simulator.host_kernels import HostKernels

_WAITING = {"flatnonzero": 1, "unique": 1, "bincount": 1}
_numbers = itertools.count()
_FREE = ("empty", "empty_like", "reshape", "view")  # nothing runs on the device
_CREATING = ("empty", "zeros", "ones", "full", "arange")


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in "device memory". Made by functions of a `StrictModule`.

    Args:
        memory: the values, as a NumPy array.
        xp: the module it belongs to.
    """

    __iter__ = None  # it would be one wait per item

    def __init__(self, memory: np.ndarray[Any, Any], xp: StrictModule) -> None:
        self.memory, self._xp = memory, xp
        self.dtype, self.shape, self.ndim = memory.dtype, memory.shape, memory.ndim
        self.size, self.nbytes, self.flags = memory.size, memory.nbytes, memory.flags
        xp.note_memory(memory)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion of a device array to a NumPy array")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} of a device array")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        self._xp.note_launch()
        return self._xp.call(getattr(ufunc, method), *inputs, **settings)

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, key: Any) -> DeviceArray:
        arrays = [part for part in _parts(key) if isinstance(part, DeviceArray)]
        if any(part.dtype == bool for part in arrays):
            self._xp.wait()
        self._xp.note_launch(bool(arrays))
        found: DeviceArray = self._xp.call(np.ndarray.__getitem__, self, key)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._xp.note_launch()
        self._xp.call(np.ndarray.__setitem__, self, key, value)

    def _number(self) -> Any:
        self._xp.wait()
        return self.memory.item()

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"an array of {self.dtype} is not an index")
        return int(self._number())

    def get(self) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        self._xp.wait()
        return self.memory.copy()

    def tolist(self) -> Any:
        """The values as Python objects."""
        return self.get().tolist()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("all", "any", "astype", "copy", "max", "min", "reshape", "sum", "view"):
            raise AttributeError(f"device arrays have no attribute {name!r}")
        self._xp.note_launch(name not in _FREE)
        return lambda *arguments, **settings: self._xp.call(getattr(np.ndarray, name), self, *arguments, **settings)


class StrictModule(ModuleType):
    """NumPy's functions for device arrays: what `kernels.xp` is, instead of CuPy.

    Attributes:
        waits: how often the host has waited for the device so far.
        launches: number of kernels and of array operations with work for the device so far. Each operation counts as
            one, although some of CuPy's are several kernels.
        alive: bytes of device arrays that exist now.
        peak: maximum of `alive` so far.
    """

    def __init__(self) -> None:
        super().__init__(f"strict_arrays_{next(_numbers)}")
        sys.modules[self.__name__] = self
        # `array_module` finds the module of an array by the module of its class.
        self.ndarray = type("ndarray", (DeviceArray,), {"__module__": self.__name__})
        self.waits = self.launches = self.alive = self.peak = 0
        self._lock = threading.RLock()  # an array can be collected while the lock is held
        self.known: dict[int, tuple[int, int]] = {}  # arrays that exist, by their id: address and bytes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(np, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            if name in _CREATING and any(isinstance(argument, DeviceArray) for argument in arguments):
                raise TypeError(f"{name} takes numbers of the host")
            several = name == "repeat" and isinstance(arguments[1], DeviceArray)
            for _ in range(_WAITING.get(name, several)):
                self.wait()
            self.note_launch(name not in _FREE)
            return self.call(function, *arguments, **settings)

        return call

    def asarray(self, array: Any, dtype: Any = None) -> DeviceArray:
        """The array itself, or a copy in device memory."""
        if isinstance(array, DeviceArray):
            return array if dtype is None else array.astype(dtype)
        self.note_launch()
        return self.array_on(np.array(array, dtype))

    def from_dlpack(self, tensor: Any) -> DeviceArray:
        """A tensor as an array, zero-copy."""
        return self.array_on(np.from_dlpack(tensor))

    def array_on(self, memory: np.ndarray[Any, Any]) -> DeviceArray:
        """An array of this module on the given memory."""
        made: DeviceArray = self.ndarray(memory, self)
        return made

    def call(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Call a function of NumPy; its arrays must be device arrays, and so are its results."""
        values = [_memory(argument) for argument in arguments]
        result = function(*values, **{name: _memory(value) for name, value in settings.items()})
        return self._wrapped(result)

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._wrapped(item) for item in result)
        return self.array_on(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result

    def wait(self) -> None:
        """Count one wait of the host for the device."""
        with self._lock:
            self.waits += 1

    def note_launch(self, launched: bool = True) -> None:
        """Count a launch, if it is one."""
        with self._lock:
            self.launches += launched

    def note_memory(self, memory: np.ndarray[Any, Any]) -> None:
        """Count the memory of an array until it is freed; that of a view is its base's."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        if memory.base is not None:  # of a tensor, or of the host
            return
        with self._lock:
            if id(memory) not in self.known:
                self.known[id(memory)] = memory.ctypes.data, memory.nbytes
                weakref.finalize(memory, self._freed, id(memory), memory.nbytes)
                self.alive += memory.nbytes
                self.peak = max(self.peak, self.alive)

    def _freed(self, number: int, nbytes: int) -> None:
        with self._lock:
            self.known.pop(number, None)
            self.alive -= nbytes


class StrictKernels(HostKernels):
    """`Kernels` that run on the host, on device arrays."""

    xp: StrictModule

    def __init__(self) -> None:
        self.xp = StrictModule()

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        self.xp.note_launch()
        super()._launch(name, blocks, [_memory(argument) for argument in arguments])

    def view(self, buffer: Any) -> Array:
        """Return a buffer as a uint8 array, zero-copy."""
        return self.xp.array_on(super().view(buffer))

    def address(self, array: Array) -> int:
        assert isinstance(array, DeviceArray), f"the device cannot read a {type(array).__name__}"
        return super().address(array.memory)


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _memory(value: Any) -> Any:
    """An argument for NumPy: the memory of device arrays, and anything else that CuPy accepts."""
    if isinstance(value, DeviceArray):
        return value.memory
    if isinstance(value, np.ndarray):
        raise TypeError("a NumPy array where a device array is expected")
    if isinstance(value, tuple | list):
        return type(value)(_memory(item) for item in value)
    return value
