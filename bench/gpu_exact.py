"""Exactness, before anything is measured: the device's engine against the CPU's, its encoder against `tokenizers`."""

from typing import Any

import numpy as np
import torch

import gpuload
from bench.gpu_data import flat, in_parts, messages
from bench.gpu_rig import Rig, name_of, open_rig, tokenizer_of
from bench.gpu_run import MissingError, Note, Task, WrongError
from gpuload.arrays import Ragged, on_host
from gpuload.dataset import PromptDataset
from gpuload.engines.device import cuda
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.errors import GpuloadError
from gpuload.reference.reference import Reference
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

_LIMIT = 512
_ROWS = 257  # of a batch that is compared


def loads(task: Task, note: Note) -> None:
    """Every file at hand, loaded by both engines: ids, columns, rejections and batches must be the same."""
    rig = open_rig(task)
    cuda.self_test(rig.kernels)
    tokenizer = tokenizer_of(task.tokenizers[0])
    for file in task.files:
        if note.seconds_left < 10:
            note(name_of(file), rows="not reached")
            continue
        try:
            note(name_of(file), **compared(rig, file, tokenizer))
        except Exception as error:  # the other files are still to be seen
            note(name_of(file), same=False, why=brief(error))
    _judge(note, "same", False)


def compared(rig: Rig, file: str, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """Cells about one file: whether a load by the device gives what a load by the CPU gives."""
    options = {"max_prompt_length": _LIMIT, "verify": "off", "progress": False, "token_cache": False} | options
    try:
        expected = gpuload.load(file, tokenizer, device="cpu", **options)
    except GpuloadError as error:
        # What the CPU engine rejects the device's must reject too, in the same words.
        try:
            rig.load(file, tokenizer, **options)
        except GpuloadError as other:
            return {"rows": 0, "rejected": f"{error!s:.80}", "same": str(other) == str(error)}
        return {"rows": 0, "rejected": f"{error!s:.80}", "same": False}
    found = rig.load(file, tokenizer, **options)
    different = differing(found.tokens, expected.tokens)
    cells: dict[str, Any] = {"rows": len(expected), "tokens": len(expected.tokens.values), "differing": different}
    cells["rejected"] = sum(expected.report.rejected.values())
    same = {
        "rejections": found.report.rejected == expected.report.rejected,
        "columns": found.columns.equals(expected.columns),
        "batches": same_batches(found, expected),
    }
    return cells | {"same": not different and all(same.values())} | {k: False for k, v in same.items() if not v}


def same_batches(found: PromptDataset, expected: PromptDataset) -> bool:
    """Whether batches of both have the same tensors, whatever their device."""
    rows = np.random.default_rng(0).integers(0, len(expected), min(_ROWS, len(expected)))
    one, other = found.batch(rows), expected.batch(rows)
    keys = ("input_ids", "attention_mask", "position_ids")
    return all(torch.equal(one[key].cpu(), other[key]) for key in keys)


def differing(found: Ragged, expected: Ragged, left: Any = None) -> int:
    """How many rows differ; all of them where there are not as many.

    Args:
        left: (n,) bool, rows that are not compared.
    """
    if len(found) != len(expected):
        return max(len(found), len(expected))
    one, other = found.to_host(), expected.to_host()
    different = one.lengths != other.lengths
    some = np.flatnonzero(~different)
    unlike = one.take(some).values != other.take(some).values
    different[np.repeat(some, one.lengths[some])[unlike]] = True
    return int(np.count_nonzero(different if left is None else different & ~left))


def tokens(task: Task, note: Note) -> None:
    """Every message at hand, encoded by the device twice: as `tokenizers` does, and both times the same."""
    rig = open_rig(task)
    for folder in task.tokenizers:
        name = name_of(folder)
        try:
            encoder = device_encoder(rig, folder)
        except MissingError as error:
            note(name, encoder=str(error))
            continue
        note(name, files=0, rows=0, bytes=0, left=0, differing=0, unlike_before=0)
        for file in task.files:
            if note.seconds_left < 15:
                note(name, reached=f"{note.facts[name]['files']} of {len(task.files)} files")
                break
            try:
                counts = encoded(rig, encoder, folder, file)
            except Exception as error:
                note(name, failed=True, why=f"{name_of(file)}: {brief(error)}")
                break
            for key, count in counts.items():
                note(name, **{key: note.facts[name][key] + count})
    if not any("differing" in cells for cells in note.facts.values()):
        raise MissingError("no tokenizer at hand has a device encoder")
    _judge(note, "differing", 1, "unlike_before", 1, "failed", 1)


def encoded(rig: Rig, encoder: DeviceEncoder, folder: str, file: str) -> dict[str, int]:
    """Cells about the messages of one file under one tokenizer."""
    backend = tokenizer_of(folder).backend_tokenizer
    cells = dict.fromkeys(("rows", "bytes", "left", "differing", "unlike_before"), 0)
    for part in in_parts(messages(file)):
        data, offsets = flat(part)
        with rig.kernels.loading(), rig.kernels.current():
            given = [rig.kernels.xp.asarray(array) for array in (data, offsets)]
            (first, left), (again, left_again) = (
                (ids.to_host(), on_host(skipped)) for ids, skipped in (encoder.encode(*given) for _ in range(2))
            )
        rows = backend.encode_batch_fast(part.to_pylist(), add_special_tokens=False)
        cells["rows"] += len(part)
        cells["bytes"] += len(data)
        cells["left"] += int(left.sum())
        cells["differing"] += differing(first, Ragged.from_lists([row.ids for row in rows]), left)
        cells["unlike_before"] += differing(again, first) + int((left_again != left).sum())
    return {"files": 1} | cells


def device_encoder(rig: Rig, folder: str) -> DeviceEncoder:
    """The device's encoder of a tokenizer.

    Raises:
        MissingError: there is none, with the reason.
    """
    twin = twin_for(folder)
    if isinstance(twin, str):
        raise MissingError(f"encoded on the host: {twin}")
    with rig.kernels.current():
        return DeviceEncoder(rig.kernels, twin)


def twin_for(folder: str) -> CompiledTokenizer | str:
    """A tokenizer's tables, or why there are none."""
    try:
        return compile_tokenizer(Reference(tokenizer_of(folder), chat_template=None))
    except Exception as error:  # the other tokenizers are still to be seen
        return brief(error)


def brief(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]:.160}"


def _judge(note: Note, *bad: Any) -> None:
    """Raises WrongError where a cell has a bad value: False, or a number of at least 1."""
    wrong = [
        row
        for row, cells in note.facts.items()
        for key, value in zip(bad[::2], bad[1::2], strict=True)
        if key in cells and (cells[key] is False if value is False else cells[key] >= value)
    ]
    if wrong:
        raise WrongError(f"not the same: {', '.join(dict.fromkeys(wrong))}")
