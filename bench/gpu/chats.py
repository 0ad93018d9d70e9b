"""Data for SFT: loads with loss masks, the kernels that make these, and the gather of packs."""

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import gpuload
from bench.gpu.data import supported_prompts
from bench.gpu.exact import brief, differing
from bench.gpu.rig import Rig, by_kernel, copy_bandwidth, name_of, open_rig, tokenizer_of
from bench.gpu.section import Facts, Task, WrongError
from bench.gpu.stages import AT_ONCE, IN_A_ROW, each_of, in_a_row
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import LOSS
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.render import DeviceText, render
from gpuload.engines.device.spans import DeviceTokenSpans
from gpuload.engines.device.store import Segments, to_device
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.host.encode import host_encoder
from gpuload.engines.host.spans import TokenSpans
from gpuload.kinds.chats.dataset import LAYOUT
from gpuload.kinds.chats.reference import ChatReference
from gpuload.packing import pack
from gpuload.packing.plan import whole_rows
from gpuload.template.compiler import ChatProgram

_PACK = 4096
_PACKS = 8  # per batch


def answered(prompts: pa.ListArray) -> pa.ListArray:
    """Return prompts as conversations: user and assistant take turns, and the last message is repeated as an answer."""
    content = prompts.flatten().field("content")
    lengths = np.diff(np.asarray(prompts.offsets))
    bounds, starts = offsets_of(lengths), offsets_of(lengths + 1)
    turn = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths + 1)
    message = np.repeat(bounds[:-1], lengths + 1) + np.minimum(turn, np.repeat(lengths - 1, lengths + 1))
    is_answer = (turn + np.repeat(lengths, lengths + 1)) % 2 == 0
    roles = pa.array(["user", "assistant"]).take(pa.array(is_answer.astype(np.int8)))
    structs = pa.StructArray.from_arrays([roles, content.take(pa.array(message))], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), structs)


def masks(task: Task, facts: Facts) -> None:
    """Load conversations with both engines, whose ids and masks must be equal; and measure the kernels of masks."""
    rig, different = open_rig(task), []
    for file, prompts in supported_prompts(task).items():
        table = pa.table({"messages": answered(prompts)})
        for directory in task.tokenizers:
            if facts.seconds_left < 15:
                return
            row = f"{name_of(file)}, {name_of(directory)}"
            try:
                cells = compared(rig, table, directory)
                facts(row, **cells)
                for kernel, about in marking(rig, table, directory).items():
                    facts(f"{row}: {kernel}", **about)
            except Exception as error:  # a template without answers, for example
                facts(row, why=brief(error))
                continue
            if cells["differing"] or not cells["batches"]:
                different.append(row)
    if different:
        raise WrongError(f"not equal: {', '.join(different)}")


def compared(rig: Rig, table: pa.Table, directory: str) -> dict[str, Any]:
    """Return cells about one table: rows whose ids or masks differ between the engines, whether batches are equal."""
    options: dict[str, Any] = {"verify": "off", "progress": False, "token_cache": False}
    expected = gpuload.load_chats(table, tokenizer_of(directory), device="cpu", **options)
    found = rig.load_chats(table, tokenizer_of(directory), **options)
    unlike = max(differing(found.tokens, expected.tokens), differing(found.loss_mask, expected.loss_mask))
    same = all(
        torch.equal(one[key].cpu(), other[key])
        for settings in ({"packing": "bfd"}, {"shuffle": True})
        for one, other in zip(found.loader(_PACKS, **settings), expected.loader(_PACKS, **settings), strict=True)
        for key in ("input_ids", "labels", "position_ids")
    )
    return {"rows": len(expected), "loss_tokens": expected.loss_tokens, "differing": unlike, "batches": same}


def marking(rig: Rig, table: pa.Table, directory: str) -> dict[str, dict[str, Any]]:
    """Return cells about the kernels that find answers in the texts of a table and mark their tokens."""
    reference = ChatReference(tokenizer_of(directory), "assistant")
    program = ChatProgram(reference.call, reference.answers)
    with rig.kernels.loading(), rig.kernels.current():
        column = from_arrow(DeviceTexts(rig.kernels), table["messages"].combine_chunks())
        render(rig.kernels, program, column)  # traces its paths
        with rig.launches() as recorded:
            text: DeviceText = render(rig.kernels, program, column)
        kernels = {"lay_answers": by_kernel(recorded)["lay_answers"]}
        ids = to_device(rig.kernels, host_encoder(reference).encode(text.text))
        spans = DeviceTokenSpans(rig.kernels, TokenSpans(reference))
        with rig.launches() as recorded:
            spans.mark(text, ids, 0, len(text))
        found = by_kernel(recorded)
    return kernels | {name: found[name] for name in ("match_tokens", "mark_answers") if name in found}


def packs(task: Task, facts: Facts) -> None:
    """Measure batches with labels, packed and padded, compared with the bandwidth of device memory."""
    rig = open_rig(task)
    facts("a large copy, read and written", **(copy := copy_bandwidth(rig)))
    rows, size = (200, 64) if rig.rehearsal else (100_000, _PACK)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(8 / size, rows), size)
    offsets = offsets_of(lengths)
    marked = Ragged(rng.integers(0, 2 * LOSS - 1, offsets[-1], np.int32), offsets)
    plan = pack(lengths, size, "bfd", shuffle=True)
    with rig.kernels.current():
        store = Segments(rig.kernels).add(marked)
        assert store is not None
        launch, held = prepare_pack(rig.kernels, store.index), deque[Any](maxlen=AT_ONCE)
        some = [np.arange(_PACKS), np.arange(len(plan) - _PACKS, len(plan))]
        with rig.launches() as recorded:
            for _ in range(IN_A_ROW):
                held.append(packed(rig.kernels, launch, plan.take(some[0])))
        alone = by_kernel(recorded)["pack"]
        tokens = int(plan.take(some[0]).lengths.sum())
        alone["bytes"] += 4 * tokens * IN_A_ROW  # the ids that it reads
        facts(f"pack, {_PACKS} × {size}", **each_of(alone, copy))
        written = 32 * tokens * IN_A_ROW
        cells = rig.timed(partial(in_a_row, lambda i: packed(rig.kernels, launch, plan.take(some[i])), held), written)
        facts("a packed batch", **each_of({"launches": IN_A_ROW} | cells, copy))

        made = DeviceBatches(rig.kernels, store, LAYOUT, 0)
        plans = [whole_rows(some, lengths[some]) for some in (rng.integers(0, rows, _PACKS) for _ in range(2))]
        written = 4 * _PACKS * size * 8 * IN_A_ROW
        cells = rig.timed(partial(in_a_row, lambda i: made(plans[i], store.to_host, size), held), written)
        facts(f"a padded batch with labels, {_PACKS} × {size}", **each_of({"launches": IN_A_ROW} | cells, copy))
