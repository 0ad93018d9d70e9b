"""Text to ids: the device encoder, kernel by kernel, and the fastest encoders of the host on all cores."""

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
from simulator.host_kernels import COMPILER
from simulator.strict_arrays import StrictKernels

from bench.gpu.data import KINDS, flat, texts
from bench.gpu.exact import brief, compiled_for, device_encoder, differing
from bench.gpu.rig import Rig, by_kernel, name_of, open_rig, tokenizer_of
from bench.gpu.section import Facts, MissingError, Task
from gpuload.core.arrays import Ragged, on_host
from gpuload.engines.device.encode import DeviceEncoder

MOST = {"tokenizers": 8 << 20, "fastokens": 64 << 20, "gigatoken": 1 << 40}
"""Bytes of text for each host encoder: about what it encodes in a second."""

_REPEATS = 3
_COUNTED = 128 << 10  # bytes of text; the numbers do not depend on them


def tables(task: Task, facts: Facts) -> None:
    """Compile the tokenizers in parallel: later sections find the tables in the user's cache."""
    with multiprocessing.get_context("fork").Pool(min(len(task.tokenizers), os.cpu_count() or 1)) as pool:
        for name, cells in pool.imap_unordered(partial(_compiled, rehearsal=task.rehearsal), task.tokenizers):
            facts(name, **cells)
    rig = open_rig(task)
    for directory in task.tokenizers:
        try:
            encoder = device_encoder(rig, directory)
        except MissingError as error:
            facts(name_of(directory), encoder=str(error))
        else:
            facts(name_of(directory), table_bytes=encoder.nbytes)


def _compiled(directory: str, rehearsal: bool) -> tuple[str, dict[str, Any]]:
    started = time.perf_counter()
    compiled = compiled_for(directory)
    took = {} if rehearsal else {"seconds": time.perf_counter() - started}
    return name_of(directory), took if isinstance(compiled, str) else {"entries": len(compiled.spec.vocab)} | took


def encode(task: Task, facts: Facts) -> None:
    """Encode each kind of text with each tokenizer: first the host encoders, then the device on the same text."""
    rig = open_rig(task)
    by_kind = {}
    for kind in KINDS:
        try:
            by_kind[kind] = texts(task, kind, task.text_bytes)
        except MissingError as error:
            facts(kind, why=str(error))
    for directory in task.tokenizers:
        try:
            encoder = device_encoder(rig, directory)
        except MissingError as error:
            facts(name_of(directory), why=str(error))
            if directory != task.tokenizers[0]:
                continue  # the host encoders are measured for at least one tokenizer
            encoder = None
        for kind, text in by_kind.items():
            name = f"{name_of(directory)}, {kind}"
            if facts.seconds_left < 20:
                facts(name, why="not reached")
                continue
            by_host = _on_host(rig, name, tokenizer_of(directory).backend_tokenizer, text, facts)
            if encoder is not None:
                _on_device(rig, f"{name}, device", encoder, text, by_host, facts)


def counts(task: Task, facts: Facts) -> None:
    """Count the waits and launches that encoding one chunk takes, with kernels compiled for the host."""
    if COMPILER is None:
        raise MissingError("no C++ compiler, which kernels for the host need")
    for directory in task.tokenizers:
        compiled = compiled_for(directory)
        if isinstance(compiled, str):
            facts(name_of(directory), why=f"encoded on the host: {compiled}")
            continue
        kernels = StrictKernels()
        encoder = DeviceEncoder(kernels, compiled)
        for kind in KINDS:
            try:
                text = texts(task, kind, _COUNTED)
            except MissingError as error:
                facts(kind, why=str(error))
                continue
            data, offsets = (kernels.xp.asarray(array) for array in flat(text))
            kernels.xp.waits = kernels.xp.launches = 0
            encoder.encode(data, offsets)
            waits, launches = kernels.xp.waits, kernels.xp.launches
            facts(f"{name_of(directory)}, {kind}", bytes=len(data), waits=waits, launches=launches)


def _on_device(
    rig: Rig, name: str, encoder: DeviceEncoder, text: pa.LargeStringArray, by_host: Any, facts: Facts
) -> None:
    data, offsets = flat(text)
    with rig.kernels.loading(), rig.kernels.current():
        given = [rig.kernels.xp.asarray(array) for array in (data, offsets)]
        ids, skipped = encoder.encode(*given)
        # Rows that fall back to the host's encoder are not the device's work: they do not count as encoded bytes.
        encoded, rows_encoded = int(np.diff(offsets)[~on_host(skipped)].sum()), int((~on_host(skipped)).sum())
        cells: dict[str, Any] = {"ids": len(ids.values), "fallback": len(text) - rows_encoded}
        cells["fallback_bytes"] = len(data) - encoded
        if by_host is not None:
            rows = len(by_host)
            cells["differing"] = differing(_first(ids, rows), by_host, on_host(skipped)[:rows])
        del ids, skipped
        peak = rig.peak(lambda: encoder.encode(*given))
        cells["peak_bytes_per_byte"] = round(peak / max(1, len(data)), 2)
        cells |= rig.timed(lambda: encoder.encode(*given), encoded, rows_encoded)
        facts(name, **cells, **_compared_with_gigatoken(facts, name, cells))
        with rig.in_a_pool():
            kept = rig.timed(lambda: encoder.encode(*given), encoded, rows_encoded)
            facts(f"{name}, CuPy's pool", **kept, **_compared_with_gigatoken(facts, name, kept))
            with rig.launches() as recorded:
                encoder.encode(*given)
    kernels = by_kernel(recorded)
    for kernel, about in kernels.items():
        facts(f"{name}: {kernel}", **about)
    facts(f"{name}: all kernels", launches=len(recorded), bytes=sum(about["bytes"] for about in kernels.values()))
    if not rig.rehearsal:
        facts(f"{name}: all kernels", seconds=sum(about["seconds"] for about in kernels.values()))


def _compared_with_gigatoken(facts: Facts, name: str, cells: dict[str, Any]) -> dict[str, float]:
    other = facts.rows.get(name.removesuffix("device") + "gigatoken", {})
    if "gb_per_s" not in cells or "gb_per_s" not in other:
        return {}
    return {"times_gigatoken": cells["gb_per_s"] / other["gb_per_s"]}


def _on_host(rig: Rig, about: str, backend: Any, text: pa.LargeStringArray, facts: Facts) -> Ragged | None:
    """Measure the host encoders. Returns the ids of `tokenizers` for the first rows."""
    expected = None
    for library, make in ENCODERS.items():
        name = f"{about}, {library}"
        some = _at_most(text, MOST[library])
        try:
            run, ids = make(backend, some)
            cells: dict[str, Any] = {"version": version(library)}
            found = ids(run())
        except ImportError as error:
            facts(name, why=f"missing: {error}")
            continue
        except Exception as error:  # unsupported: each library raises its own errors
            facts(name, why=brief(error))
            continue
        if library == "tokenizers":
            expected = found
        elif expected is not None:
            rows = min(len(found), len(expected))
            cells["differing"] = differing(_first(found, rows), _first(expected, rows))
        nbytes = int(flat(some)[0].nbytes)
        facts(name, **rig.timed(run, nbytes, len(some), _REPEATS, warm_up=False), **cells)  # `ids(run())` warmed up
    return expected


def _tokenizers(backend: Any, text: pa.LargeStringArray) -> tuple[Callable[[], Any], Callable[[Any], Ragged]]:
    rows = text.to_pylist()
    return (
        lambda: backend.encode_batch_fast(rows, add_special_tokens=False),
        lambda made: Ragged.from_lists([row.ids for row in made]),
    )


def _gigatoken(backend: Any, text: pa.LargeStringArray) -> tuple[Callable[[], Any], Callable[[Any], Ragged]]:
    import awkward

    tokenizer = importlib.import_module("gigatoken").Tokenizer.from_json(backend.to_str())
    data, offsets = flat(text)
    layout = awkward.contents.ListOffsetArray(
        awkward.index.Index64(offsets),
        awkward.contents.NumpyArray(data, parameters={"__array__": "char"}),
        parameters={"__array__": "string"},
    )
    given = awkward.Array(layout)
    return (
        lambda: tokenizer.encode_batch(given).layout,
        lambda made: Ragged(made.content.data.view(np.int32), np.asarray(made.offsets.data, np.int64)),
    )


def _fastokens(backend: Any, text: pa.LargeStringArray) -> tuple[Callable[[], Any], Callable[[Any], Ragged]]:
    tokenizer = importlib.import_module("fastokens").Tokenizer.from_json_str(backend.to_str())
    rows = text.to_pylist()
    return (
        lambda: tokenizer.encode_batch_flat(rows),
        lambda made: Ragged(np.frombuffer(made[0], np.int32), np.frombuffer(made[1], np.uint64).astype(np.int64)),
    )


ENCODERS = {"tokenizers": _tokenizers, "gigatoken": _gigatoken, "fastokens": _fastokens}
"""Library → function of a `tokenizers.Tokenizer` and texts that returns a function to encode them, and one to convert
the result to `Ragged`."""


def _at_most(text: pa.LargeStringArray, nbytes: int) -> pa.LargeStringArray:
    _, offsets = flat(text)
    return text[: max(1, int(np.searchsorted(offsets, nbytes, side="right")) - 1)]


def _first(ids: Ragged, rows: int) -> Ragged:
    offsets = ids.offsets[: rows + 1]
    return Ragged(ids.values[: int(offsets[-1])], offsets)
