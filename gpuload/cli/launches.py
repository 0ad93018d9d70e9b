"""Launches of kernels, saved where a known answer is wrong, and repeated on the host: `gpuload doctor --gpu --dump DIR`
and `gpuload doctor --replay DIR`.

A launch is saved as the memory that it can reach, before and after: the arrays that it is given, and what the addresses
in these point into. For the host, that memory is mapped at the same addresses, in a process for each launch, so that
addresses stay what they are, in arguments and in results.
"""

import ctypes
import hashlib
import json
import mmap
import multiprocessing
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.core.errors import DeviceError, OptionError
from gpuload.core.options import nearest
from gpuload.engines.device.host_build import build, launch
from gpuload.engines.device.kernel_source import signatures, source
from gpuload.engines.device.kernels import DeviceKernels, Kernels
from gpuload.engines.failures import one_line

_SEEDS = range(16)  # orders of threads; where results differ between them, they are not compared
_MOST_BLOCKS = 16  # kernels do the same with any number of blocks
_TO_HOST = 2  # cudaMemcpyDeviceToHost
_MAP_FIXED_NOREPLACE = 0x100000

_Memory = dict[int, np.ndarray[Any, Any]]  # address → bytes


@dataclass
class Allocations:
    """The device memory that exists, by address. While a launch is saved, none is freed."""

    nbytes: dict[int, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def add(self, address: int, nbytes: int) -> None:
        with self.lock:
            self.nbytes[address] = nbytes

    def remove(self, address: int) -> None:
        with self.lock:
            self.nbytes.pop(address, None)


def of_cupy(kernels: DeviceKernels) -> Allocations:
    """Makes CuPy allocate each array by itself, in this process, and returns what it has allocated."""
    found, cuda = Allocations(), kernels.xp.cuda

    def malloc(size: int, device: int) -> int:
        address = int(cuda.runtime.malloc(size))
        found.add(address, size)
        return address

    def free(address: int, device: int) -> None:
        found.remove(address)
        with suppress(cuda.runtime.CUDARuntimeError):  # of a context that is lost
            cuda.runtime.free(address)

    cuda.set_allocator(cuda.PythonFunctionAllocator(malloc, free).malloc)
    return found


# -- save ------------------------------------------------------------------------------------------------------------


def save_wrong(
    kernels: Kernels, allocations: Allocations, directory: Path, kernel: str | None, about: dict[str, Any]
) -> str | None:
    """Runs known answers up to the first case that is wrong, and saves that case's launches, of one kernel or of all,
    in a new directory or an empty one, with what is known `about` GPU and versions.

    Returns:
        What is wrong, or None if no case is: then nothing is saved.

    Raises:
        OptionError: there is no such kernel, or there are files in the directory, or it cannot be made.
    """
    from gpuload.cli.known_answers import cases

    check(directory, kernel)
    about = {"source": _digest()} | about
    for name, case in cases().items():
        described = {"case": name, "wrong": "the process ended"} | about  # unless it comes to tell
        (directory / "about.json").write_text(json.dumps(described))
        try:
            with _saving(kernels, allocations, directory, kernel):
                case(kernels)
        except Exception as error:  # whatever a kernel does
            (directory / "about.json").write_text(json.dumps(described | {"wrong": one_line(error)}))
            return f"{name}: {one_line(error)}"
        for file in directory.glob("*.npz"):
            file.unlink()
    for file in directory.iterdir():
        file.unlink()
    return None


def check(directory: Path, kernel: str | None) -> None:
    """Makes the directory, or raises what `save_wrong` raises."""
    if kernel is not None and kernel not in signatures():
        raise OptionError(f"--kernel: there is no kernel {kernel}{nearest(kernel, set(signatures()))}")
    if directory.exists() and (not directory.is_dir() or next(directory.iterdir(), None) is not None):
        raise OptionError(f"--dump: {directory} has files: name a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--dump: cannot make the directory {directory} ({one_line(error)}): name another one"
        ) from error


def _digest() -> str:
    return hashlib.sha256(source().encode()).hexdigest()


@contextmanager
def _saving(kernels: Kernels, allocations: Allocations, directory: Path, wanted: str | None) -> Iterator[None]:
    """Saves each launch within the block, first what it reads: a launch may end the process."""
    launch_kernel, numbers = kernels._launch, iter(range(1, 10**6))

    def saving(name: str, blocks: int, arguments: list[Any]) -> None:
        if wanted not in (None, name):
            launch_kernel(name, blocks, arguments)
            return
        with allocations.lock:
            stem = f"{next(numbers):05}-{name}"
            pairs = zip(signatures()[name], arguments, strict=True)
            given = [_described(kernels, value) if p.is_array else [value.item()] for p, value in pairs]
            about = {"name": name, "blocks": blocks, "segment": kernels.segment, "arguments": given}
            before = _reached(kernels, allocations, given)
            _write(directory / f"{stem}.before.npz", before, about)
            launch_kernel(name, blocks, arguments)
            kernels.synchronize()
            after = {address: _read(kernels, address, len(data)) for address, data in before.items()}
            _write(directory / f"{stem}.after.npz", after, {})

    kernels._launch = saving  # type: ignore[method-assign]
    try:
        yield
    finally:
        del kernels._launch


def _described(kernels: Kernels, array: Any) -> list[Any]:
    """Address, dtype and number of items."""
    return [kernels.address(array) if array.size else 0, str(array.dtype), array.size]


def _reached(kernels: Kernels, allocations: Allocations, arguments: list[list[Any]]) -> _Memory:
    found: _Memory = {}
    words = [np.zeros(0, np.uint64)]
    for address, dtype, size in (each for each in arguments if len(each) == 3 and each[2]):
        found[address] = _read(kernels, address, size * np.dtype(dtype).itemsize)
        if np.dtype(dtype).itemsize == 8:
            words.append(found[address].view(np.uint64))
    known = sorted(allocations.nbytes.items())
    if known:
        starts, nbytes = (np.array(column, np.uint64) for column in zip(*known, strict=True))
        values = np.concatenate(words)
        at = np.searchsorted(starts, values, side="right") - 1
        inside = (at >= 0) & (values - starts[at] < nbytes[at])
        for number in np.unique(at[inside]):
            address, size = known[number]
            if address not in found or len(found[address]) < size:
                found[address] = _read(kernels, address, size)
    return found


def _read(kernels: Kernels, address: int, nbytes: int) -> np.ndarray[Any, Any]:
    if kernels.device == "cpu":
        return _copied(address, nbytes)
    made = np.empty(nbytes, np.uint8)
    kernels.synchronize()
    kernels.xp.cuda.runtime.memcpy(made.ctypes.data, address, nbytes, _TO_HOST)
    return made


def _write(file: Path, memory: _Memory, about: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {str(address): data for address, data in memory.items()}
    np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


# -- replay ----------------------------------------------------------------------------------------------------------


def replay(directory: Path) -> bool:
    """Repeats on the host launches that `save_wrong` has saved, up to the first that wrote something else on the GPU.
    Prints what it finds.

    Returns:
        Whether all launches wrote the same on the GPU.

    Raises:
        OptionError: the directory has no launches.
        DeviceError: there is no compiler, or memory cannot be mapped at the addresses that were saved.
    """
    say = partial(print, flush=True)
    files = sorted(directory.glob("*.before.npz"))
    try:
        about = dict(json.loads((directory / "about.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"--replay: {directory} has no launches: gpuload doctor --gpu --dump saves them") from error
    if about.get("source") != _digest():  # code of a directory is never run
        raise OptionError(
            f"--replay: {directory} is of other kernels: use gpuload {about.get('gpuload', '')} as it was there"
        )
    say("".join(f"{name}: {value}\n" for name, value in about.items()).rstrip())
    for file in files:
        done = file.with_name(file.name.replace(".before.", ".after."))
        name = file.name.partition(".")[0]
        if not done.exists():
            say(f"launch {name}: did not end on the GPU")
        found = _in_a_fork(_compared, file, done if done.exists() else None)
        if found or not done.exists():
            say(f"launch {name}: {found or 'ends on the host'}")
            return False
    say(f"{len(files)} launches write on the host what they wrote on the GPU")
    return True


def _in_a_fork(work: Callable[..., str], *arguments: Any) -> str:
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            there.send(work(*arguments))
        except Exception as error:
            there.send(error)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        process.join()
        return f"ends the process on the host, with {process.exitcode}: it reads or writes other memory than its arrays"
    process.join()
    if isinstance(found, Exception):
        raise found
    return str(found)


def _compared(before: Path, after: Path | None) -> str:
    """What a launch writes otherwise on the host, or an empty text."""
    about, given = _load(before)
    library = build(source(), f"SEGMENT={about['segment']}", any_order=True)
    _map(given)
    parameters = signatures()[about["name"]]
    arguments = [
        _array(*value) if len(value) == 3 else parameter.dtype.type(value[0])
        for parameter, value in zip(parameters, about["arguments"], strict=True)
    ]
    results: list[_Memory] = []
    for seed in _SEEDS:
        for address, data in given.items():
            ctypes.memmove(address, data.ctypes.data, len(data))
        launch(library, about["name"], min(about["blocks"], _MOST_BLOCKS), seed, arguments)
        results.append({address: _copied(address, len(data)) for address, data in given.items()})
    if after is None:
        return ""
    _, found = _load(after)
    names = {
        value[0]: (p.name, value[1]) for p, value in zip(parameters, about["arguments"], strict=True) if p.is_array
    }
    for address, data in found.items():
        name, dtype = names.get(address, ("memory that it has the address of", "uint8"))
        expected = [result[address].view(dtype) for result in results]
        settled = np.all([each == expected[0] for each in expected], axis=0)
        wrong = np.flatnonzero((data.view(dtype) != expected[0]) & settled)
        if len(wrong):
            first = wrong[0]
            return (
                f"{name}[{first}] is {data.view(dtype)[first]} on the GPU and {expected[0][first]} on the host; "
                f"{len(wrong):,} of {len(settled):,} items differ"
            )
    return ""


def _load(file: Path) -> tuple[dict[str, Any], _Memory]:
    try:
        with np.load(file) as saved:
            memory = {int(name): saved[name] for name in saved.files if name != "about"}
            return json.loads(str(saved["about"])), memory
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OptionError(f"--replay: {file} cannot be read ({error}): was the command stopped?") from error


def _map(memory: _Memory) -> None:
    """Maps the pages of some memory where it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    pages = sorted({n for a, data in memory.items() for n in range(a // page, (a + len(data) - 1) // page + 1)})
    cuts = np.flatnonzero(np.diff(pages) > 1) + 1
    for run in np.split(np.array(pages, np.int64), cuts) if pages else []:
        address, flags = int(run[0]) * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        place = [ctypes.c_void_p(address), ctypes.c_size_t(len(run) * page), protection, flags, -1, ctypes.c_long(0)]
        if libc.mmap(*place) != address:
            raise DeviceError("this process uses the addresses that were saved: run the command again")


def _array(address: int, dtype: str, size: int) -> np.ndarray[Any, Any]:
    if not size:
        return np.zeros(0, dtype)
    memory = (ctypes.c_uint8 * (size * np.dtype(dtype).itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype)


def _copied(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    made = np.empty(nbytes, np.uint8)
    ctypes.memmove(made.ctypes.data, address, nbytes)
    return made
