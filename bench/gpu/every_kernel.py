"""`python -m bench.gpu.every_kernel`: runs every kernel once on little data, for compute-sanitizer, which is slow.

There is no memory pool: each array is an allocation of its own, so that the sanitizer sees accesses beyond its end.
"""

import numpy as np
import pyarrow as pa
import torch

from bench.gpu.data import flat
from bench.gpu.exact import device_encoder
from bench.gpu.rig import Rig, program_of, tokenizer_of
from gpuload.core.arrays import Ragged
from gpuload.demo_data import demo_files
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device.batches import pad, prepare_pad
from gpuload.engines.device.kernels import DeviceKernels
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.render import render
from gpuload.engines.device.spans import DeviceTokenSpans
from gpuload.engines.device.store import Segments, to_device
from gpuload.engines.device.texts import BOUNDS_ONLY, DeviceTexts, texts_to_device
from gpuload.engines.host.encode import host_encoder
from gpuload.engines.host.spans import TokenSpans
from gpuload.kinds.chats.dataset import LAYOUT as CHATS
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.pairs.dataset import layout_of
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing import pack
from gpuload.packing.plan import whole_rows
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Operation, Predicate, Ref

_TEXTS = ["", " a ", "x" * 1000, " é中🙂 \n", "it's 12345", "<|im_end|>", "a</think>b", "\n\n", "e\u0301", "\u0378"]


def main() -> None:
    """Run on the first GPU."""
    rig = Rig(DeviceKernels(0), torch.device("cuda", 0), rehearsal=False)
    rig.kernels.xp.cuda.set_allocator(None)  # no pool
    print(run(rig))


def run(rig: Rig) -> str:
    """Render, evaluate predicates, encode, mark answers, pad and pack.

    Returns:
        A line that counts rows, launches and kernels.
    """
    directory = demo_files()[1]
    texts = [text * (1 + number % 3) for number in range(20) for text in _TEXTS]
    roles = [("system", "user"), ("user",)]
    rows = [[{"role": role, "content": text} for role in roles[i % 2]] for i, text in enumerate(texts)]
    kernels, ops = rig.kernels, DeviceTexts(rig.kernels)
    with rig.launches() as recorded, kernels.current():
        render(kernels, program_of(directory), from_arrow(ops, pa.array(rows)))
        column = texts_to_device(kernels, [text.encode() for text in texts])
        for name in sorted(BOUNDS_ONLY):
            ops.operate(column, Operation(name, () if "strip" in name else ("a",)))
        for test in ("contains", "startswith", "endswith", "equals", "empty"):
            ops.answer(column, Predicate(Ref(0), test, "a"))
        lists = [list(range(number % 70)) for number in range(len(texts))]
        store = Segments(kernels).add(Ragged.from_lists(lists))
        assert store is not None
        of_rows = whole_rows(np.arange(len(texts)), store.lengths).truncated(40, "middle")
        for layout in (LAYOUT, CHATS, layout_of("dpo")):
            pad(kernels, prepare_pad(kernels, store.index, layout, 0), of_rows, 64, layout)
        gather = prepare_pack(kernels, store.index)
        plan = pack(store.lengths, 64, "bfd_split")
        packed(kernels, gather, plan)
        answers = ChatReference(tokenizer_of(directory), "assistant")
        chats = from_arrow(ops, pa.array([[*row, {"role": "assistant", "content": "é"}] for row in rows]))
        text = render(kernels, ChatProgram(answers.call, answers.answers), chats)
        ids = to_device(kernels, host_encoder(answers).encode(text.text))
        DeviceTokenSpans(kernels, TokenSpans(answers)).mark(text, ids, 0, len(text))
        data, offsets = flat(pa.array(texts, pa.large_string()))
        device_encoder(rig, directory).encode(kernels.xp.asarray(data), kernels.xp.asarray(offsets))
        kernels.synchronize()
    return f"{len(rows)} rows, {len(recorded)} launches of {len({launch.name for launch in recorded})} kernels"


if __name__ == "__main__":
    main()
