"""Exactness: the device engine compared with the CPU engine, its encoder compared with `tokenizers`."""

from typing import Any

import numpy as np
import torch

import gpuload
from bench.gpu.data import flat, in_parts, messages
from bench.gpu.rig import Rig, name_of, open_rig, tokenizer_of
from bench.gpu.section import Facts, MissingError, Task, WrongError
from gpuload.core.arrays import Ragged, on_host
from gpuload.core.errors import GpuloadError
from gpuload.engines.device import cuda
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.kinds.prompts import PromptDataset
from gpuload.reference.reference import Reference
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

_LIMIT = 512
_ROWS = 257  # of a batch that is compared


def loads(task: Task, facts: Facts) -> None:
    """Load every file with both engines: ids, columns, rejected rows and batches must be equal."""
    rig = open_rig(task)
    cuda.self_test(rig.kernels)
    tokenizer = tokenizer_of(task.tokenizers[0])
    for file in task.files:
        if facts.seconds_left < 10:
            facts(name_of(file), rows="not reached")
            continue
        try:
            facts(name_of(file), **compared(rig, file, tokenizer))
        except Exception as error:  # the other files are still compared
            facts(name_of(file), same=False, why=brief(error))
    _judge(facts, "same", False)


def compared(rig: Rig, file: str, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """Return cells about one file: whether a load on the device equals a load on the CPU."""
    defaults: dict[str, Any] = {"max_prompt_length": _LIMIT, "verify": "off", "progress": False, "token_cache": False}
    options = defaults | options
    try:
        expected = gpuload.load(file, tokenizer, device="cpu", **options)
    except GpuloadError as error:
        # A file that the CPU engine rejects must be rejected by the device engine with the same message.
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
    """Return whether batches of both have equal tensors, on whatever device."""
    rows = np.random.default_rng(0).integers(0, len(expected), min(_ROWS, len(expected)))
    one, other = found.batch(rows), expected.batch(rows)
    keys = ("input_ids", "attention_mask", "position_ids")
    return all(torch.equal(one[key].cpu(), other[key]) for key in keys)


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


def tokens(task: Task, facts: Facts) -> None:
    """Encode every message twice on the device: ids must equal those of `tokenizers`, and each other."""
    rig = open_rig(task)
    for directory in task.tokenizers:
        name = name_of(directory)
        try:
            encoder = device_encoder(rig, directory)
        except MissingError as error:
            facts(name, encoder=str(error))
            continue
        facts(name, files=0, rows=0, bytes=0, fallback=0, differing=0, unlike_before=0)
        for file in task.files:
            if facts.seconds_left < 15:
                facts(name, reached=f"{facts.rows[name]['files']} of {len(task.files)} files")
                break
            try:
                counts = encoded(rig, encoder, directory, file)
            except Exception as error:
                facts(name, failed=True, why=f"{name_of(file)}: {brief(error)}")
                break
            for key, count in counts.items():
                facts(name, **{key: facts.rows[name][key] + count})
    if not any("differing" in cells for cells in facts.rows.values()):
        raise MissingError("no tokenizer has a device encoder")
    _judge(facts, "differing", 1, "unlike_before", 1, "failed", 1)


def encoded(rig: Rig, encoder: DeviceEncoder, directory: str, file: str) -> dict[str, int]:
    """Return cells about the messages of one file and one tokenizer."""
    backend = tokenizer_of(directory).backend_tokenizer
    cells = dict.fromkeys(("rows", "bytes", "fallback", "differing", "unlike_before"), 0)
    for part in in_parts(messages(file)):
        data, offsets = flat(part)
        with rig.kernels.loading(), rig.kernels.current():
            given = [rig.kernels.xp.asarray(array) for array in (data, offsets)]
            (first, skipped), (again, skipped_again) = (
                (ids.to_host(), on_host(rows)) for ids, rows in (encoder.encode(*given) for _ in range(2))
            )
        rows = backend.encode_batch_fast(part.to_pylist(), add_special_tokens=False)
        cells["rows"] += len(part)
        cells["bytes"] += len(data)
        cells["fallback"] += int(skipped.sum())
        cells["differing"] += differing(first, Ragged.from_lists([row.ids for row in rows]), skipped)
        cells["unlike_before"] += differing(again, first) + int((skipped_again != skipped).sum())
    return {"files": 1} | cells


def device_encoder(rig: Rig, directory: str) -> DeviceEncoder:
    """Build the device encoder of a tokenizer.

    Raises:
        MissingError: The tokenizer falls back to the host.
    """
    compiled = compiled_for(directory)
    if isinstance(compiled, str):
        raise MissingError(f"encoded on the host: {compiled}")
    with rig.kernels.current():
        return DeviceEncoder(rig.kernels, compiled)


def compiled_for(directory: str) -> CompiledTokenizer | str:
    """Return a compiled tokenizer, or why it cannot be compiled."""
    try:
        return compile_tokenizer(Reference(tokenizer_of(directory), chat_template=None).model_json)
    except Exception as error:  # the other tokenizers are still compared
        return brief(error)


def brief(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]:.160}"


def _judge(facts: Facts, *bad: Any) -> None:
    """Raise WrongError if a cell has a bad value: False, or a number that is at least the given one."""
    wrong = [
        row
        for row, cells in facts.rows.items()
        for key, value in zip(bad[::2], bad[1::2], strict=True)
        if key in cells and (cells[key] is False if value is False else cells[key] >= value)
    ]
    if wrong:
        raise WrongError(f"not equal: {', '.join(dict.fromkeys(wrong))}")
