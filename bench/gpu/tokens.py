"""Text to ids: the device encoder, kernel by kernel, and the fastest encoders of the host on all cores."""

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from bench.gpu.data import KINDS, flat, texts
from bench.gpu.rig import Rig, by_kernel, name_of, open_rig, tokenizer_of
from bench.gpu.section import Facts, MissingError, Task, WrongError
from gpuload.core.arrays import Ragged, on_host
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

MOST = {"tokenizers": 8 << 20, "gigatoken": 1 << 40}
"""Bytes of text for each host encoder: about what it encodes in a second."""


def encode(task: Task, facts: Facts) -> None:
    """Encode each kind of text with each tokenizer: first the host encoders, then the device on the same text. Its ids
    must be those of `tokenizers`, as far as these were made."""
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
            continue
        tables = (*encoder._merger.words, *encoder._merger._merges)
        facts(name_of(directory), table_bytes=sum(int(getattr(table, "nbytes", 0)) for table in tables))
        for kind, text in by_kind.items():
            name = f"{name_of(directory)}, {kind}"
            if facts.seconds_left < 20:
                facts(name, why="not reached")
                continue
            by_host = _on_host(rig, name, tokenizer_of(directory).backend_tokenizer, text, facts)
            _on_device(rig, f"{name}, device", encoder, text, by_host, facts)
    if wrong := [row for row, cells in facts.rows.items() if row.endswith(", device") and cells.get("differing")]:
        raise WrongError(f"the device makes other ids than tokenizers: {', '.join(wrong)}")


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
        if by_host is not None:
            rows = len(by_host)
            cells["differing"] = differing(_first(ids, rows), by_host, on_host(skipped)[:rows])
        del ids, skipped
        cells |= rig.timed(lambda: encoder.encode(*given), encoded, rows_encoded)
        other = facts.rows.get(name.removesuffix("device") + "gigatoken", {})
        if "gb_per_s" in cells and "gb_per_s" in other:
            cells["times_gigatoken"] = cells["gb_per_s"] / other["gb_per_s"]
        facts(name, **cells)
        with rig.launches() as recorded:
            encoder.encode(*given)
    for kernel, about in by_kernel(recorded).items():
        facts(f"{name}: {kernel}", **about)


def _on_host(rig: Rig, about: str, backend: Any, text: pa.LargeStringArray, facts: Facts) -> Ragged | None:
    """Measure the host encoders. Returns the ids of `tokenizers` for the first rows."""
    expected = None
    for library, make in ENCODERS.items():
        name, (_, offsets) = f"{about}, {library}", flat(text)
        some = text[: max(1, int(np.searchsorted(offsets, MOST[library], side="right")) - 1)]
        try:
            run, ids = make(backend, some)
            cells: dict[str, Any] = {"version": version(library)}
            found = ids(run())
        except Exception as error:  # not installed, or unsupported: each library raises its own errors
            facts(name, why=brief(error))
            continue
        if library == "tokenizers":
            expected = found
        elif expected is not None:
            rows = min(len(found), len(expected))
            cells["differing"] = differing(_first(found, rows), _first(expected, rows))
        nbytes = int(flat(some)[0].nbytes)
        facts(name, **rig.timed(run, nbytes, len(some), 3, warm_up=False), **cells)  # `ids(run())` warmed up
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


ENCODERS = {"tokenizers": _tokenizers, "gigatoken": _gigatoken}
"""Library → function of a `tokenizers.Tokenizer` and texts that returns a function to encode them, and one to convert
the result to `Ragged`."""


def _first(ids: Ragged, rows: int) -> Ragged:
    offsets = ids.offsets[: rows + 1]
    return Ragged(ids.values[: int(offsets[-1])], offsets)


def differing(found: Ragged, expected: Ragged, skipped: Any = None) -> int:
    """Return the number of rows that differ; the larger number of rows if the numbers of rows differ.

    Args:
        found: Ids to check.
        expected: Ids to compare with.
        skipped: (n,) bool, rows that are not compared.
    """
    if len(found) != len(expected):
        return max(len(found), len(expected))
    one, other = found.to_host(), expected.to_host()
    different = one.lengths != other.lengths
    some = np.flatnonzero(~different)
    unlike = one.take(some).values != other.take(some).values
    different[np.repeat(some, one.lengths[some])[unlike]] = True
    return int(np.count_nonzero(different if skipped is None else different & ~skipped))


def device_encoder(rig: Rig, directory: str) -> DeviceEncoder:
    """Build the device encoder of a tokenizer.

    Raises:
        MissingError: The tokenizer falls back to the host.
    """
    try:
        reference = Reference(tokenizer_of(directory), chat_template=None)
        compiled: CompiledTokenizer | str = compile_tokenizer(reference.model_json)
    except Exception as error:  # the other tokenizers are still compared
        compiled = brief(error)
    if isinstance(compiled, str):
        raise MissingError(f"encoded on the host: {compiled}")
    with rig.kernels.current():
        return DeviceEncoder(rig.kernels, compiled)


def brief(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]:.160}"
