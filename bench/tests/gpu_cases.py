"""Loads and encoders of the device compared with those of the CPU."""

import itertools
from typing import Any

import torch

from bench.gpu.data import flat, messages
from bench.gpu.rig import DEFAULTS, LOADS, Rig, tokenizer_of
from bench.gpu.tokens import differing
from gpuload.core.arrays import Ragged, on_host
from gpuload.core.errors import GpuloadError
from gpuload.engines.device.encode import DeviceEncoder

LIMIT = {"max_prompt_length": 512}
_BATCHES = 4  # of each loader that is compared
_ROWS = 8192


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


def encoded(rig: Rig, encoder: DeviceEncoder, directory: str, file: str) -> dict[str, int]:
    """Return cells about the messages of one file and one tokenizer."""
    backend = tokenizer_of(directory).backend_tokenizer
    cells = dict.fromkeys(("rows", "bytes", "fallback", "differing", "unlike_before"), 0)
    whole = messages(file)
    for part in (whole.slice(start, _ROWS) for start in range(0, len(whole), _ROWS)):
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
