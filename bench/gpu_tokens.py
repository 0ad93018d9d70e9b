"""Text → ids: the device's encoder, kernel by kernel, beside the fastest encoders of the host on all cores."""

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

from bench.gpu_data import KINDS, flat, texts
from bench.gpu_exact import brief, device_encoder, differing, twin_for
from bench.gpu_rig import Rig, by_kernel, name_of, open_rig, rates, tokenizer_of
from bench.gpu_run import MissingError, Note, Task
from gpuload.arrays import Ragged, on_host
from gpuload.engines.device.encode import DeviceEncoder

MOST = {"tokenizers": 8 << 20, "fastokens": 64 << 20, "gigatoken": 1 << 40}
"""Bytes of text for each encoder of the host: what it does in about a second."""

_REPEATS = 3


def tables(task: Task, note: Note) -> None:
    """Compiles each tokenizer's tables, several at a time: later sections find them in the user's cache."""
    with multiprocessing.get_context("fork").Pool(min(len(task.tokenizers), os.cpu_count() or 1)) as pool:
        for name, cells in pool.imap_unordered(partial(_compiled, rehearsal=task.rehearsal), task.tokenizers):
            note(name, **cells)
    rig = open_rig(task)
    for folder in task.tokenizers:
        try:
            encoder = device_encoder(rig, folder)
        except MissingError as error:
            note(name_of(folder), encoder=str(error))
        else:
            note(name_of(folder), table_bytes=encoder.nbytes)


def _compiled(folder: str, rehearsal: bool) -> tuple[str, dict[str, Any]]:
    started = time.perf_counter()
    twin = twin_for(folder)
    took = {} if rehearsal else {"seconds": time.perf_counter() - started}
    return name_of(folder), took if isinstance(twin, str) else {"entries": len(twin.spec.vocab)} | took


def encode(task: Task, note: Note) -> None:
    """Each kind of text under each tokenizer: the encoders of the host, then the device on the same text."""
    rig = open_rig(task)
    by_kind = {}
    for kind in KINDS:
        try:
            by_kind[kind] = texts(task, kind, task.text_bytes)
        except MissingError as error:
            note(kind, why=str(error))
    for folder in task.tokenizers:
        try:
            encoder = device_encoder(rig, folder)
        except MissingError as error:
            note(name_of(folder), why=str(error))
            if folder != task.tokenizers[0]:
                continue  # of one tokenizer the host's encoders are measured in any case
            encoder = None
        for kind, text in by_kind.items():
            name = f"{name_of(folder)}, {kind}"
            if note.seconds_left < 20:
                note(name, why="not reached")
                continue
            by_host = _on_host(task, name, tokenizer_of(folder).backend_tokenizer, text, note)
            if encoder is not None:
                _on_device(rig, f"{name}, device", encoder, text, by_host, note)


def _on_device(
    rig: Rig, name: str, encoder: DeviceEncoder, text: pa.LargeStringArray, by_host: Any, note: Note
) -> None:
    data, offsets = flat(text)
    with rig.kernels.loading(), rig.kernels.current():
        given = [rig.kernels.xp.asarray(array) for array in (data, offsets)]
        ids, left = encoder.encode(*given)
        cells: dict[str, Any] = {"ids": len(ids.values), "left": int(left.sum())}
        if by_host is not None:
            rows = len(by_host)
            cells["differing"] = differing(_first(ids, rows), by_host, on_host(left)[:rows])
        del ids, left
        peak = rig.peak(lambda: encoder.encode(*given))
        cells["peak_bytes_per_byte"] = round(peak / max(1, len(data)), 2)
        cells |= rig.timed(lambda: encoder.encode(*given), len(data), len(text))
        note(name, **cells, **_beside_gigatoken(note, name, cells))
        with rig.in_a_pool():
            kept = rig.timed(lambda: encoder.encode(*given), len(data), len(text))
            note(f"{name}, pool of CuPy's", **kept, **_beside_gigatoken(note, name, kept))
            with rig.launches() as noted:
                encoder.encode(*given)
    kernels = by_kernel(noted)
    for kernel, about in kernels.items():
        note(f"{name}: {kernel}", **about)
    note(f"{name}: all kernels", launches=len(noted), bytes=sum(about["bytes"] for about in kernels.values()))
    if not rig.rehearsal:
        note(f"{name}: all kernels", seconds=sum(about["seconds"] for about in kernels.values()))


def _beside_gigatoken(note: Note, name: str, cells: dict[str, Any]) -> dict[str, float]:
    other = note.facts.get(name.removesuffix("device") + "gigatoken", {})
    if "gb_per_s" not in cells or "gb_per_s" not in other:
        return {}
    return {"times_gigatoken": cells["gb_per_s"] / other["gb_per_s"]}


def _on_host(task: Task, about: str, backend: Any, text: pa.LargeStringArray, note: Note) -> Ragged | None:
    """Rates of the encoders of the host. The ids of `tokenizers`, for the first rows."""
    expected = None
    for library, make in ENCODERS.items():
        name = f"{about}, {library}"
        some = _at_most(text, MOST[library])
        try:
            run, ids = make(backend, some)
            cells: dict[str, Any] = {"version": version(library)}
            found = ids(run())
        except ImportError as error:
            note(name, why=f"missing: {error}")
            continue
        except Exception as error:  # a rejection, in whatever form the library gives it
            note(name, why=brief(error))
            continue
        if library == "tokenizers":
            expected = found
        elif expected is not None:
            rows = min(len(found), len(expected))
            cells["differing"] = differing(_first(found, rows), _first(expected, rows))
        note(name, **_timed_on_host(task, run, int(flat(some)[0].nbytes), len(some)), **cells)
    return expected


def _timed_on_host(task: Task, run: Callable[[], Any], nbytes: int, rows: int) -> dict[str, Any]:
    """Like `Rig.timed`, with no device to wait for; the caller has done the work once."""
    sizes = {"bytes": nbytes, "rows": rows}
    if task.rehearsal:
        return sizes
    took = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return sizes | rates(sorted(took)[len(took) // 2], nbytes, rows)


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
"""Each makes of a `tokenizers.Tokenizer` and texts: what encodes them, and what makes `Ragged` of its answer."""


def _at_most(text: pa.LargeStringArray, nbytes: int) -> pa.LargeStringArray:
    _, offsets = flat(text)
    return text[: max(1, int(np.searchsorted(offsets, nbytes, side="right")) - 1)]


def _first(ids: Ragged, rows: int) -> Ragged:
    offsets = ids.offsets[: rows + 1]
    return Ragged(ids.values[: int(offsets[-1])], offsets)
