"""`gpuload doctor --gpu`: everything that a load on a GPU needs, from the driver to whole loads, step by step. Each
step is a process of its own with a limit of time, and the first that fails says what to report.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.cli import launches
from gpuload.cli.machine import nvidia_smi, versions
from gpuload.core.arrays import on_host
from gpuload.core.errors import MismatchError
from gpuload.core.files import cache_root
from gpuload.engines.device import verdict
from gpuload.engines.device.kernels import waits_for_each, writable
from gpuload.engines.failures import one_line

_SIZE = 1 << 20  # bytes, or items, of the data that steps copy


def run(given: argparse.Namespace) -> int:
    """`gpuload doctor` with `--gpu` or `--replay`: the ladder, or what another option asks for. Returns 0, or 1 if
    something is wrong."""
    number, step, directory, kernel = given.gpu, given.gpu_step, given.dump, given.kernel
    if given.replay:
        return 0 if launches.replay(given.replay) else 1
    if step == "dump" and directory:
        return run_here(lambda: dump_here(number, directory, kernel))
    if step:
        return run_here(lambda: STEPS[step][0](number))
    return dump(number, directory, kernel) if directory else climb(number)


def climb(number: int) -> int:
    """Runs all steps on a GPU, up to the first that fails, and prints what each found. Returns 0, or 1 if a step
    failed."""
    for name, (_, limit) in STEPS.items():
        started = time.perf_counter()
        with verdict.alone() if name == "kernels" else nullcontext():
            done = verdict.run_step(name, number, limit)
        print(f"{name:9} {'FAILED' if done.failure else 'works'} ({time.perf_counter() - started:.1f} s)")
        print("".join(f"    {line}\n" for line in done.output.splitlines()), end="", flush=True)
        if done.failure:
            print(f"    {done.failure}", flush=True)
            if name in _LAUNCHES:  # compiled with what names the kernel: other machine code than that of loads
                again = verdict.run_step(name, number, limit, wait=True).failure
                print(f"    with GPULOAD_SYNC=1: {again or 'works'}")
            print("\nPlease report this output. device='cpu' does without the GPU", flush=True)
            return 1
    return 0


def dump(number: int, directory: Path, kernel: str | None) -> int:
    """Saves the launches of the first known answer that is wrong on a GPU in a new directory, and repeats them on the
    host; only those of a kernel, if one is named. Returns 0, or 1 if something is wrong."""
    launches.check(directory, kernel)
    more = ["--dump", str(directory), *(["--kernel", kernel] if kernel else [])]
    done = verdict.run_step("dump", number, 2 * verdict.LIMIT, *more)
    print(done.output, end="", flush=True)
    if not done.failure:
        return 0
    print(done.failure)
    if not (directory / "about.json").exists():
        print("\nNothing was saved: run `gpuload doctor --gpu`, which begins with what this needs", flush=True)
        return 1
    (directory / "nvidia-smi.txt").write_text(nvidia_smi("-q"))
    print(f"\nPlease report this output, with {directory}", flush=True)
    launches.replay(directory)
    return 1


def dump_here(number: int, directory: Path, kernel: str | None) -> None:
    """`dump`, in this process. Without a memory pool: each array is an allocation by itself. A wrong answer is an
    error."""
    from gpuload.engines.device.kernels import DeviceKernels

    kernels = DeviceKernels(number)
    about = verdict.described(number) | versions()
    if wrong := launches.save_wrong(kernels, launches.of_cupy(kernels), directory, kernel, about):
        raise MismatchError(f"{wrong}: launches are in {directory}")
    print("every known answer is right: nothing was saved")


def run_here(work: Callable[[], None]) -> int:
    """Runs one step in this process. Prints what it finds; the last line of standard error says why it failed."""
    try:
        work()
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split()):.1000}", file=sys.stderr)
        return verdict.WRONG if isinstance(error, MismatchError) else 1
    return 0


# -- the steps -------------------------------------------------------------------------------------------------------


def _environment(number: int) -> None:
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "CUPY_CACHE_DIR", "LD_LIBRARY_PATH"):
        if name in os.environ:
            print(f"{name}={os.environ[name]}")
    for place in (Path(os.path.expanduser("~")), cache_root()):
        print(f"{place}: {'can' if writable(place) else 'cannot'} be written")
    asked = "index,name,driver_version,vbios_version,compute_mode,mig.mode.current,ecc.mode.current,memory.used"
    print(nvidia_smi(f"--query-gpu={asked}", "--format=csv").rstrip() or "nvidia-smi is missing or lists no GPU")
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch")
    if not torch.cuda.device_count():
        raise RuntimeError("torch finds no NVIDIA GPU or driver: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if number >= torch.cuda.device_count():
        raise RuntimeError(f"there is no GPU {number}: torch finds {torch.cuda.device_count()}")


def _context(number: int) -> None:
    kernels = _kernels(number)
    runtime = kernels.xp.cuda.runtime
    about = verdict.described(number)
    for name, value in about.items():
        print(f"{name}: {value}")
    if about["compute_mode"] == verdict.EXCLUSIVE:
        print("exclusive-process mode: no second process may use this GPU while one does")
    _libraries()
    # cudaDevAttrMemoryPoolsSupported and cudaDevAttrCanUseHostPointerForRegisteredMem
    print(f"memory pools: {runtime.deviceGetAttribute(115, number)}")
    print(f"pinned memory at the host's addresses: {runtime.deviceGetAttribute(91, number)}")
    with kernels.current():
        free, total = runtime.memGetInfo()
    print(f"{free >> 20:,} of {total >> 20:,} MiB free")
    for _ in range(2):  # from the pool that RMM gets, also after it was emptied
        with kernels.loading():
            check_copies(kernels.xp)
    with kernels.current():
        check_copies(kernels.xp)


def _libraries() -> None:
    """Prints which libraries this process has loaded: another one than that of the package is a common fault."""
    with suppress(OSError):  # not Linux
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        names = ("libcuda.", "libcudart", "libnvrtc.", "librmm", "libcudf")
        print("".join(f"{path}\n" for path in sorted(mapped) if Path(path).name.startswith(names)), end="")


def check_copies(xp: Any) -> None:
    """Copies bytes to an array module's device and back."""
    data = np.random.default_rng(0).integers(0, 256, _SIZE, np.uint8)
    _expect("copied bytes", on_host(xp.asarray(data)), data)


def _arrays(number: int) -> None:
    kernels = _kernels(number)
    with kernels.current():
        check_arrays(kernels.xp)


def check_arrays(xp: Any) -> None:
    """Compares what the engine calls of an array module with NumPy."""
    chance = np.random.default_rng(0)
    numbers, few = chance.integers(0, 1000, 10_007), chance.integers(0, 50, 10_007)
    flags, floor = few > 25, np.sort(numbers)
    given: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "cumsum": (lambda m, a: m.cumsum(a), (numbers,)),
        "cumsum into an array": (lambda m, a: m.cumsum(a, out=m.zeros(len(a) + 1, np.int64)[1:]), (numbers,)),
        "flatnonzero": (lambda m, a: m.flatnonzero(a), (flags,)),
        "unique": (lambda m, a: m.concatenate(m.unique(a, return_index=True, return_inverse=True)), (few,)),
        "searchsorted": (lambda m, a, b: m.searchsorted(a, b, side="right"), (floor, numbers)),
        "where": (lambda m, a, b: m.where(a, b, -1), (flags, numbers)),
        "minimum": (lambda m, a, b: m.minimum(a, b), (numbers, few)),
        "diff": (lambda m, a: m.diff(a), (numbers,)),
        "argsort": (lambda m, a: m.argsort(a, kind="stable"), (few,)),
        "take": (lambda m, a, b: a[b], (numbers, few)),
        "assign": (lambda m, a, b: _assigned(a.copy(), b), (numbers, flags)),
        "unpackbits": (lambda m, a: m.unpackbits(a.astype(np.uint8), bitorder="little"), (few,)),
        "count_nonzero": (lambda m, a: m.asarray(m.count_nonzero(a)), (flags,)),
        "or in place": (lambda m, a: a.astype(np.int32).__ior__(1 << 30), (numbers,)),
        "view": (lambda m, a: a.view(np.uint8), (numbers,)),
        "a slice that is not aligned": (lambda m, a: a.view(np.uint8)[1:-7].copy().view(np.int64) + 1, (numbers,)),
        "repeat": (lambda m, a, b: m.repeat(a, b), (numbers, few)),
        "repeat flags": (lambda m, a, b: m.repeat(a, b), (flags, few)),
        "maximum": (lambda m, a: m.maximum(25, a), (few,)),
        "bincount": (lambda m, a: m.bincount(a, minlength=70), (few,)),
        "stack": (lambda m, a, b: m.stack([a, b], axis=1).ravel(), (numbers, few)),
        "arange": (lambda m: m.concatenate([m.arange(5, 10_007, 3), m.arange(7, dtype=np.int64)]), ()),
        "full": (lambda m: m.full(10_007, -3, np.int32), ()),
        "zeros": (lambda m: m.zeros((2, 10_007), np.int64), ()),
        "ones": (lambda m: m.ones(10_007, bool), ()),
        "empty arrays": (lambda m, a: _filled(m.empty(10_007, np.int32), m.empty_like(a)), (numbers,)),
    }
    for name, (call, arrays) in given.items():
        _expect(name, on_host(call(xp, *map(xp.asarray, arrays))), call(np, *arrays))
    print(f"{len(given)} functions as in NumPy")


def _assigned(array: Any, flags: Any) -> Any:
    array[flags] = -7
    return array


def _filled(array: Any, like: Any) -> Any:
    array[...], like[...] = 3, 4
    return array + like


def _compile(number: int) -> None:
    from gpuload.engines.device.kernel_source import signatures
    from gpuload.engines.device.kernels import machine_code

    started = time.perf_counter()
    kernels = _kernels(number)
    print(f"machine code: {machine_code[number]}")
    with kernels.current():
        for name in signatures():
            kernels._function(name)
    print(f"{len(signatures())} kernels in {time.perf_counter() - started:.1f} s")


def _known_answers(number: int) -> None:
    from gpuload.cli.known_answers import wrong_answers

    place = verdict.place_of(verdict.described(number))

    def keep(failure: str, at: float | None) -> None:
        if not waits_for_each():  # that is other machine code than loads run
            verdict.keep(place, failure, at)

    # Whatever becomes of this process, an earlier verdict is no longer true: one kernel may end it, or never end.
    keep("a check did not come to its end", 0)
    found: dict[str, Exception] = {}
    for name, error in wrong_answers(_kernels(number)):
        print(f"{name}: {one_line(error) if error else 'right'}", flush=True)
        found |= {name: error} if error else {}
    failure = "; ".join(f"{name}: {one_line(error)}" for name, error in found.items())
    wrong = any(isinstance(error, MismatchError) for error in found.values())
    keep(failure, None if wrong or not found else time.time())
    if found:
        raise MismatchError(failure) if wrong else RuntimeError(failure)


def _torch(number: int) -> None:
    import torch

    kernels = _kernels(number)
    with kernels.current():
        tensor, array = kernels.tensor(3, 1000)
        array[...] = 7
        if tensor.data_ptr() != kernels.address(array):
            raise MismatchError("a tensor does not share the memory of its array")
        _expect("a tensor that an array has filled", tensor.cpu().numpy(), np.full((3, 1000), 7))
    side = torch.cuda.Stream(number)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side), kernels.current():
        _, array = kernels.tensor(_SIZE)
        array[...] = 5
        doubled = torch.utils.dlpack.from_dlpack(array) * 2
    torch.cuda.current_stream(number).wait_stream(side)
    _expect("work on a stream of torch", doubled.cpu().numpy(), np.full(_SIZE, 10))
    check_pinned(kernels)


def check_pinned(kernels: Any) -> None:
    """Reads memory of the host that was pinned in place, by a kernel."""
    from gpuload.core.arrays import Ragged
    from gpuload.engines.device.store import DeviceStore, host_store

    rows = host_store([Ragged.from_lists([[1, 2], [3], []])], None)
    with kernels.current():
        address = kernels.pinned(rows.values)
    pinned = DeviceStore(kernels, address + 4 * rows.offsets[:-1], rows.lengths, [rows.values])
    if pinned.take(np.array([1, 0])).to_lists() != [[3], [1, 2]]:
        raise MismatchError("kernels read wrong values from pinned memory of the host")


def _cudf(number: int) -> None:
    from gpuload.engines.device import cuda, cudf

    if why_not := cuda.without_cudf():
        print(f"not used, Arrow reads: {why_not}")
        return
    import pyarrow as pa

    from gpuload.core.options import Options
    from gpuload.demo_data import demo_files
    from gpuload.engines.conversations import Conversations
    from gpuload.sources.open import open_sources
    from gpuload.sources.read import one_array, one_column

    kernels, notes = _kernels(number), list[str]()
    (source,) = open_sources(demo_files()[0], Options(max_prompt_length=512))
    expected = one_array(pa.chunked_array([c for each in one_column(source, "prompt") for c in each.chunks]))
    with kernels.loading():
        small = cudf.chunks(kernels, source.parquet or "", "prompt", expected.type, 1 << 16, 1 << 13)
        for how, parts in (("whole", cuda.reader(kernels, notes)(source, "prompt")), ("in parts", small)):
            rows = 0
            for prompts in parts or ():
                if not isinstance(prompts, Conversations) or notes:
                    raise RuntimeError("; ".join(notes) or "Arrow was used")
                some = np.arange(0, len(prompts), max(1, len(prompts) // 100))
                # By value: cuDF says of columns without nulls that they can have none, which is another type to Arrow.
                if prompts.fetch(some).to_pylist() != expected.take((rows + some).tolist()).to_pylist():
                    raise MismatchError(f"cuDF and Arrow read different prompts, {how}")
                rows += len(prompts)
            if rows != len(expected):
                raise MismatchError(f"cuDF reads {rows:,} rows, {how}, and Arrow {len(expected):,}")
            print(f"{rows:,} rows as Arrow reads them, {how}")
    _libraries()


def _pipeline(number: int) -> None:
    import gpuload
    from gpuload.cli.selftest import check_engine
    from gpuload.demo_data import demo_files
    from gpuload.engines.device.cuda import cuda_engine

    outcome = check_engine(lambda reference: cuda_engine(reference, f"cuda:{number}"))
    for stage, seconds in outcome.seconds.items():
        print(f"{stage}: {seconds:.3f} s")
    if outcome.failure:
        raise MismatchError(": ".join(outcome.failure))
    file, tokenizer = demo_files()
    options: dict[str, Any] = {"max_prompt_length": 128, "token_cache": False, "progress": False}
    expected = gpuload.load(file, tokenizer, device="cpu", **options)
    for tokens_on in ("device", "host"):
        seed = int.from_bytes(os.urandom(2), "big")  # other batches each time
        found = gpuload.load(file, tokenizer, device=f"cuda:{number}", tokens_on=tokens_on, **options)
        _expect("ids", found.tokens.values, expected.tokens.values)
        for one, other in zip(found.loader(64, seed=seed), expected.loader(64, seed=seed), strict=True):
            for key in ("input_ids", "attention_mask", "position_ids"):
                _expect(f"{key} of a batch with seed {seed}", one[key].cpu().numpy(), other[key].numpy())
        print(f"{len(found):,} rows and all their batches, ids in memory of the {tokens_on}")


def _kernels(number: int) -> Any:
    from gpuload.engines.device.cuda import CudaKernels

    return CudaKernels(number, 0)


def _expect(what: str, found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    if found.dtype != expected.dtype or not np.array_equal(found, expected):
        raise MismatchError(f"{what}: wrong results")


_LAUNCHES = ("kernels", "torch", "cudf", "loads")

STEPS: dict[str, tuple[Callable[[int], None], float]] = {
    "machine": (_environment, 60),
    "context": (_context, 120),
    "arrays": (_arrays, 300),
    "compile": (_compile, 300),
    "kernels": (_known_answers, verdict.LIMIT),
    "torch": (_torch, 120),
    "cudf": (_cudf, 120),
    "loads": (_pipeline, 300),
}
"""Name → what a step does with a GPU's number, and its limit in seconds."""
