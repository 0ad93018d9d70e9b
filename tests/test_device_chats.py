"""load_chats by the device engine, with kernels of the host: ids, masks and batches are those of the CPU engine."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulator import load_chats_with
from simulator.host_kernels import COMPILER, HostKernels
from simulator.stream_checks import StreamKernels
from test_chats import CHATS, QWEN3, TOOL, chat, labels_of, rows_of
from test_stream_checks import reader
from tiers import SHARED, core, examples, shared, shared_files

import gpuload
from gpuload.core.errors import DeviceError
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device import cuda
from gpuload.engines.device import engine as device
from gpuload.engines.device.render import render
from gpuload.engines.device.shared import SharedTables
from gpuload.engines.device.spans import DeviceTokenSpans
from gpuload.engines.device.texts import DeviceTexts
from gpuload.kinds.chats.reference import ChatReference
from gpuload.template.compiler import ChatProgram

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = StreamKernels()
PLANS: list[dict[str, Any]] = [
    {"batch_size": 2, "packing": "bfd", "pack_length": 50, "shuffle": True},
    {"batch_size": 1, "packing": "wrapped", "pack_length": 17},
    {"batch_size": 2, "packing": "trl", "pack_length": 64},
    {"max_tokens": 4096, "shuffle": True, "seed": 1},
    {"max_tokens": 4096, "padded": False},
    {"batch_size": 3, "group_by_length": True},
    {"batch_size": 3, "shuffle": True, "padding": "max_length"},
]


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Loads and batches use arrays on several streams in order, and free none that a stream still uses."""
    KERNELS.races.clear()
    yield
    gc.collect()
    assert KERNELS.races == []


def on_device(files: Any, tokenizer: Any, rows: int | None = None, **options: Any) -> gpuload.ChatDataset:
    """`load_chats` by the device's engine; `rows`: read into device memory, in chunks of so many rows."""
    return load_chats_with(KERNELS, files, tokenizer, None if rows is None else reader(KERNELS, rows), **options)


def assert_same(found: gpuload.ChatDataset, expected: gpuload.ChatDataset, plans: Any = PLANS[:1]) -> None:
    assert found.report.check.mismatches == []
    for one, other in ((found.tokens, expected.tokens), (found.loss_mask, expected.loss_mask)):
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.offsets, other.offsets)
    assert found.fingerprint == expected.fingerprint
    assert found.report.rejected == expected.report.rejected
    assert found.report.overlong == expected.report.overlong
    assert found.columns.equals(expected.columns)
    assert str(found) == str(expected)
    assert rows_of(found)[:5] == rows_of(expected)[:5]
    for plan in plans:
        pairs = zip(found.loader(**plan), expected.loader(**plan), strict=True)
        assert all(same_batch(one, other) for one, other in pairs), plan


def same_batch(one: Any, other: Any) -> bool:
    assert list(one) == list(other)
    return all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else str(value) == str(other[key])
        for key, value in one.items()
    )


@pytest.fixture
def both(qwen: Any) -> Any:
    """Loads by both engines and compares everything; returns the device's."""

    def load(files: Any, rows: int | None = None, plans: Any = PLANS[:1], **options: Any) -> gpuload.ChatDataset:
        found = on_device(files, qwen, rows, **options)
        assert_same(found, gpuload.load_chats(files, qwen, device="cpu", **options), plans)
        return found

    return load


# -- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("template", ["default", QWEN3], ids=["answers found", "generation blocks"])
def test_masks_and_all_batches(both: Any, rows: int | None, template: str) -> None:
    table = pa.table({"messages": CHATS * 9, "n": list(range(9 * len(CHATS)))})
    found = both(table, rows, PLANS, chat_template=template)
    assert "chat template compiled, rendered and encoded by kernels" in found.report.engine
    assert not any("host" in note for note in [*found.report.notes, *found.report.counts])


def test_masks_are_those_of_transformers(qwen: Any) -> None:
    found = on_device(pa.table({"messages": CHATS}), qwen, chat_template=QWEN3)
    assert rows_of(found) == [labels_of(qwen, messages, QWEN3) for messages in CHATS]


@examples(15)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "system"]),
            st.lists(st.text("a \n<|im_end|>é\u0301👋你", max_size=12), min_size=2, max_size=6),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_masks_of_any_conversation(qwen: Any, rows: list[tuple[str, list[str]]]) -> None:
    chats = [chat(*texts, system=system or None) for system, texts in rows]
    found = on_device(pa.table({"messages": chats}), qwen, chat_template=QWEN3, progress=False, verify="off")
    assert rows_of(found) == [labels_of(qwen, messages, QWEN3) for messages in chats]


OPTIONS: list[dict[str, Any]] = [
    {"loss_on": "all"}, {"loss_on": "last"}, {"tokens_on": "host"}, {"max_samples": 20, "shuffle": True, "seed": 3},
    {"max_length": 40, "overlong": "keep_start"}, {"max_length": 14, "overlong": "keep_end"}, {"max_length": 40},
    {"loss_on": "last", "chat_template": QWEN3, "verify": "full"},
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    core(OPTIONS, *OPTIONS[1::3]),
    ids=str,
)  # fmt: skip
def test_options(both: Any, options: dict[str, Any]) -> None:
    both(pa.table({"messages": CHATS * 5, "n": list(range(5 * len(CHATS)))}), 7, PLANS[:1] + PLANS[3:4], **options)


def test_rows_that_are_dropped_are_counted(both: Any) -> None:
    rows = [CHATS[0], chat("Hi"), None, [], [{"role": "user", "content": None}], CHATS[3]]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    found = both(pa.table({"messages": pa.array(rows, kind)}))
    assert len(found) == 2
    assert sum(found.report.rejected.values()) == 4


def test_rows_that_transformers_renders_are_marked_among_the_others(both: Any) -> None:
    """They take no path through the compiled template; their texts are cut where their answers are."""
    template = QWEN3.replace(
        "{%- for message in messages %}", "{%- for message in messages %}{{ (message.content|wordcount|string)[:0] }}"
    )
    assert template != QWEN3
    found = both(pa.table({"messages": CHATS * 3}), 4, chat_template=template)
    assert found.report.rows_compiled == 0
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    calls = [*CHATS[0], {"role": "user", "content": "é"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = both(pa.table({"messages": [calls, CHATS[1], [*calls, *CHATS[2]], CHATS[3]]}), chat_template=QWEN3)
    assert found.report.rows_compiled == 4


def test_the_loss_of_texts_that_kernels_leave(both: Any) -> None:
    """Some are not in NFC, and some have a pre-token that is too long to merge."""
    odd = ["cafe\u0301", "l\u0304\u0323" * 50, "x" * 5000, "", "é", "<|im_end|>"]
    both(pa.table({"messages": [chat(text, f" {text} ", "and", text) for text in odd * 3]}), 5, max_length=20_000)


def test_a_tokenizer_without_tables_encodes_on_the_host(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compile_tokenizer", lambda reference: "the model is Unigram, not BPE")
    monkeypatch.setattr(KERNELS, "shared", SharedTables())
    found = both(pa.table({"messages": CHATS}))
    assert "rendered by kernels; encoded by gigatoken" in found.report.engine


# -- real data -------------------------------------------------------------------------------------------------------


@shared
@pytest.mark.parametrize("name", ["zh_multiturn", "sgd_multiturn"])
@pytest.mark.parametrize("template", ["default", QWEN3], ids=["answers found", "generation blocks"])
def test_real_conversations(both: Any, name: str, template: str) -> None:
    files = [str(file) for file in shared_files(f"{name}.parquet")]
    options: dict[str, Any] = {"messages_key": "prompt", "max_samples": 400, "verify": "off"}
    both(files, 150, chat_template=template, **options)


@shared
@pytest.mark.parametrize("name", ["qwen3", "llama3.1-instruct", "gemma3", "smollm", "gpt2", "deepseek-v3"])
def test_real_conversations_as_transformers_masks_them(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    table = pq.read_table(SHARED / "datasets" / "zh_multiturn.parquet").slice(0, 60).select(["prompt"])
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    options: dict[str, Any] = {"messages_key": "prompt", "chat_template": QWEN3, "pad_token_id": 0}
    found = on_device(table, tokenizer, **options)
    expected = [labels_of(tokenizer, messages, QWEN3) for messages in table["prompt"].to_pylist()]
    kept = [row for row in expected if any(label != -100 for label in row[1]) and len(row[0]) <= 4096]
    assert rows_of(found) == kept


@shared
def test_wild_conversations(both: Any) -> None:
    """Prompts as people have them; most have no answer, so the loss is on all tokens."""
    for file in shared_files("wild/*.parquet")[::5]:
        kind = pq.read_schema(file)
        if "prompt" in kind.names and pa.types.is_list(kind.field("prompt").type):
            options: dict[str, Any] = {"format": "messages", "messages_key": "prompt", "loss_on": "all"}
            both(str(file), 40, max_samples=100, max_length=20_000, verify="off", **options)


# -- other formats ---------------------------------------------------------------------------------------------------

BY_HOST = "rows rendered and encoded on the host: kernels take columns of messages only"
COMPLETIONS = [{"prompt": each[:-1], "completion": each[-1:]} for each in CHATS[:4]]
FORMATS: dict[str, tuple[list[Any], int]] = {
    # rows, and how many of them the host renders and encodes
    "prompts and completions": (COMPLETIONS, 0),
    "tools": ([{"messages": CHATS[0], "tools": f"[{str(TOOL).replace(chr(39), chr(34))}]"}, {"messages": CHATS[1]}], 2),
    "sharegpt": ([{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}], 0),
    "alpaca": ([{"instruction": "And?", "input": "", "output": "Bye."}], 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_conversations(both: Any, name: str) -> None:
    rows, by_host = FORMATS[name]
    found = both(pa.Table.from_pylist(rows))
    assert found.report.counts == ({BY_HOST: by_host} if by_host else {})
    assert found.report.engine.endswith("; batches on cpu") == bool(by_host)


@pytest.mark.parametrize(("loss_on", "by_host"), [("completion", 0), ("all", 4), ("assistant", 4)])
def test_loss_of_completions(both: Any, loss_on: Any, by_host: int) -> None:
    """Kernels make marks of one kind: where completions begin."""
    found = both(pa.Table.from_pylist(COMPLETIONS * 3), loss_on=loss_on)
    assert not found.report.check.mismatches
    assert found.report.counts == ({BY_HOST: 3 * by_host} if by_host else {})


@pytest.mark.parametrize("rows", [[{"text": "one"}, {"text": ""}], [{"prompt": "one", "completion": " two"}]], ids=str)
def test_formats_without_a_template(both: Any, rows: list[Any]) -> None:
    found = both(pa.Table.from_pylist(rows), plans=PLANS[3:5])
    assert found.report.engine.startswith("cpu: prompts are plain text, encoded by")
    assert found.report.engine.endswith("; batches on cpu")


@pytest.mark.parametrize("template", ["default", QWEN3], ids=["answers found", "generation blocks"])
def test_answers_that_messages_mark(both: Any, template: str) -> None:
    """Kernels mark the answers of rows that the host has rendered, among others."""
    chats = [[message | {"train": k % 3 > 0} for message in each] for k, each in enumerate(CHATS * 3)]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("train", pa.bool_())]))
    found = both(pa.table({"messages": pa.array(chats, kind)}), 4, PLANS[:1], chat_template=template)
    assert found.report.notes[0] == "format: messages, loss on marked"
    assert 0 < len(found) < len(chats)


# -- failures --------------------------------------------------------------------------------------------------------


def test_memory_that_runs_out_divides_the_work(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room, sizes, mark = [10], list[int](), DeviceTokenSpans.mark

    def little_for_rendering(kernels: Any, program: Any, column: Any) -> Any:
        if len(column) > room[0]:
            raise MemoryError
        return render(kernels, program, column)

    def little_for_marking(self: Any, text: Any, ids: Any, low: int, high: int) -> None:
        if high - low > room[0]:
            raise MemoryError
        sizes.append(high - low)
        mark(self, text, ids, low, high)

    monkeypatch.setattr(device, "render", little_for_rendering)
    monkeypatch.setattr(DeviceTokenSpans, "mark", little_for_marking)
    table = pa.table({"messages": CHATS * 5})
    both(table)
    assert sum(sizes) == 35
    room[0] = 40
    monkeypatch.setattr(DeviceTokenSpans, "mark", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(DeviceError, match="out of GPU memory while marking answers"):
        both(table, device="cuda")


def test_where_the_gpu_fails_auto_takes_the_cpu(qwen: Any) -> None:
    class Broken(HostKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            if name == "mark_answers":
                raise RuntimeError("an illegal memory access")
            super()._launch(name, blocks, arguments)

    table = pa.table({"messages": CHATS})
    with pytest.warns(UserWarning, match="falling back to the CPU .RuntimeError: an illegal memory access"):
        found = load_chats_with(Broken(), table, qwen)
    assert_same(found, gpuload.load_chats(table, qwen, device="cpu"), PLANS)


def test_a_wrong_mask_on_the_device_is_found(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = DeviceTokenSpans.mark

    def wrong(self: Any, text: Any, ids: Any, low: int, high: int) -> None:
        mark(self, text, ids, low, high)
        ids.values[ids.offsets[1:] - 1] ^= 1 << 30

    monkeypatch.setattr(DeviceTokenSpans, "mark", wrong)
    table = pa.table({"messages": CHATS})
    with pytest.warns(UserWarning, match="differs from the tokenizer"):
        found = on_device(table, qwen)
    monkeypatch.undo()
    assert_same(found, gpuload.load_chats(table, qwen, device="cpu"))


def test_without_a_gpu(qwen: Any) -> None:
    why = cuda.unavailable_reason("cuda")
    if why is None:
        pytest.skip("there is a GPU")
    table = pa.table({"messages": CHATS})
    assert f"no GPU is used: {why}" in gpuload.load_chats(table, qwen).report.notes
    with pytest.raises(DeviceError, match="device='cuda': .*; or use device='cpu' or 'auto'"):
        gpuload.load_chats(table, qwen, device="cuda")


# -- batches ---------------------------------------------------------------------------------------------------------


def test_batches_are_made_where_the_process_is(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    launch = HostKernels._launch
    found = load_chats_with(HostKernels(), pa.table({"messages": CHATS}), qwen)
    monkeypatch.setattr(HostKernels, "_launch", lambda self, name, *rest: (ran.append(name), launch(self, name, *rest)))
    padded, packs = found.batch([0, 1]), partial(found.loader, 2, packing="bfd", pack_length=50)
    flat = list(packs())
    assert ran[0] == "pad"
    assert ran.count("pack") == len(flat)
    travelled = pickle.loads(pickle.dumps(found))
    found._batches._process = -1  # type: ignore[attr-defined]
    found.tokens  # noqa: B018
    del ran[:]
    for elsewhere in (travelled, found):
        assert same_batch(elsewhere.batch([0, 1]), padded)
        loader = elsewhere.loader(2, packing="bfd", pack_length=50)
        assert all(same_batch(one, other) for one, other in zip(loader, flat, strict=True))
    assert ran == []


def test_packs_are_made_one_batch_ahead(qwen: Any) -> None:
    happened: list[str] = []

    class Noting(HostKernels):
        @contextmanager
        def aside(self) -> Iterator[None]:
            happened.append("aside")
            yield
            happened.append("back")

        def rejoin(self) -> None:
            happened.append("rejoin")

        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            happened.append(name)
            super()._launch(name, blocks, arguments)

    found = load_chats_with(Noting(), pa.table({"messages": CHATS}), qwen)
    loader = found.loader(2, packing="bfd", pack_length=100)
    loader.state_dict()  # its fingerprint reads all ids once
    batches = len(loader)
    assert batches > 1
    del happened[:]
    for _ in loader:
        happened.append("used")
    made = ["aside", "pack", "back", "rejoin"]
    expected = made + [*made[:3], "used", "rejoin"] * (batches - 1) + ["aside", "back", "used"]
    assert happened == expected


def test_ids_from_the_token_cache_keep_their_loss(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": CHATS}), file)
    cold = on_device(str(file), qwen)
    warm = on_device(str(file), qwen)
    assert warm.report.from_cache == [str(file)]
    assert_same(warm, cold, PLANS)
    assert_same(warm, gpuload.load_chats(str(file), qwen, device="cpu"), PLANS)


def test_waits_and_launches_of_rendering(qwen: Any) -> None:
    """Answers add a kernel, the copy of its table, and no wait. The number of rows adds neither."""
    reference, counts = ChatReference(qwen, "assistant"), []
    for rows in (20, 700):
        prompts = pa.array([CHATS[k % 2] for k in range(rows)])
        for answers in (None, reference.answers):
            kernels = StreamKernels()
            program = ChatProgram(reference.call, answers)
            for _ in range(2):  # first, its paths are traced
                column = from_arrow(DeviceTexts(kernels), prompts)
                kernels.xp.waits = kernels.xp.launches = 0
                assert (render(kernels, program, column).answers is None) == (answers is None)
            counts.append((kernels.xp.waits, kernels.xp.launches))
    print(counts)
    (waits, launches), (waits_too, launches_too) = counts[:2]
    assert waits_too == waits
    assert launches_too - launches == 2
    assert counts[2:] == counts[:2]
