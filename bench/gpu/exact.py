"""Exactness: loads by the device engine compared with the CPU engine's, its encoder compared with `tokenizers`."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from bench import agents
from bench.gpu.data import answered, flat, in_parts, messages, paired, supported_prompts
from bench.gpu.rig import DEFAULTS, LOADS, Rig, name_of, open_rig, tokenizer_of
from bench.gpu.section import Facts, MissingError, Task, WrongError
from gpuload.core.arrays import Ragged, on_host
from gpuload.core.errors import GpuloadError
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

LIMIT = {"max_prompt_length": 512}
_BATCHES = 4  # of each loader that is compared


def loads(task: Task, facts: Facts) -> None:
    """Load every file as prompts, chats and pairs, and rows of agents, with both engines: all must be equal."""
    rig, tokenizer = open_rig(task), tokenizer_of(task.tokenizers[0])
    for file in task.files:
        _compare(facts, name_of(file), rig, "prompts", file, tokenizer, **LIMIT)
    for file, prompts in supported_prompts(task).items():
        chats = answered(prompts)
        _compare(facts, f"{name_of(file)}, chats", rig, "chats", pa.table({"messages": chats}), tokenizer)
        _compare(facts, f"{name_of(file)}, pairs", rig, "pairs", paired(prompts), tokenizer)
    _compare(facts, "rows of agents", rig, "chats", agent_rows(task, min(5000, *task.rows)), tokenizer)
    _judge(facts, "same", False)


def agent_rows(task: Task, count: int) -> str:
    """Write conversations with tools, calls and results, nearly all of another shape; return the file."""
    draw, file = random.Random(0), Path(task.scratch) / f"agents-{count}.jsonl"
    file.write_text("".join(json.dumps(agents.with_tools(draw)) + "\n" for _ in range(count)))
    return str(file)


def _compare(facts: Facts, row: str, rig: Rig, kind: str, data: Any, tokenizer: Any, **options: Any) -> None:
    if facts.seconds_left < 10:
        facts(row, rows="not reached")
        return
    try:
        facts(row, **compared(rig, kind, data, tokenizer, **options))
    except Exception as error:  # the others are still compared
        facts(row, same=False, why=brief(error))


def compared(rig: Rig, kind: str, data: Any, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """Return cells about one load: whether that on the device equals that on the CPU."""
    try:
        expected = LOADS[kind](data, tokenizer, device="cpu", **DEFAULTS | options)
    except GpuloadError as error:
        # What the CPU engine rejects must be rejected by the device engine with the same message.
        try:
            rig.load(data, tokenizer, kind, **options)
        except GpuloadError as other:
            return {"rows": 0, "rejected": f"{error!s:.80}", "same": str(other) == str(error)}
        return {"rows": 0, "rejected": f"{error!s:.80}", "same": False}
    found = rig.load(data, tokenizer, kind, **options)
    same = {
        "ids": found.fingerprint == expected.fingerprint,
        "rejections": found.report.rejected == expected.report.rejected,
        "columns": found.columns.equals(expected.columns),
        "batches": same_batches(found, expected, {}, *([{"packing": "bfd"}] if kind == "chats" else [])),
    }
    cells = {"rows": len(expected), "rejected": sum(expected.report.rejected.values()), "same": all(same.values())}
    if kind != "pairs":
        cells |= {"tokens": len(expected.tokens.values), "differing": differing(found.tokens, expected.tokens)}
    return cells | {name: False for name, equal in same.items() if not equal}


def same_batches(found: Any, expected: Any, *settings: dict[str, Any]) -> bool:
    """Return whether the first batches of both have equal tensors, on whatever device, with each of some settings."""
    size = min(32, len(expected))
    return all(
        torch.equal(one[key].cpu(), value)
        for some in settings
        for one, other in itertools.islice(
            zip(*(rows.loader(size, shuffle=True, seed=0, **some) for rows in (found, expected)), strict=True), _BATCHES
        )
        for key, value in other.items()
        if isinstance(value, torch.Tensor)
    )


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
