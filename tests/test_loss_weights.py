"""Weights of messages: `loss_weight`."""

from __future__ import annotations

import itertools
import pickle
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
from simulator.host_kernels import COMPILER
from simulator.stream_checks import StreamKernels
from test_marked import QWEN3, TOOL, answer, load_json, user
from tiers import examples

import gpuload
from gpuload.core.errors import DataError, OptionError, TokenizerError
from gpuload.reference.reference import Reference
from gpuload.reference.vocabulary import check_vocabulary

WEIGHTS = (None, 0, 1, 0.5, 2.5, 0.1, 3)
PLANS: list[dict[str, Any]] = [
    {"batch_size": 2},
    {"batch_size": 2, "padding": "max_length"},
    {"max_tokens": 200},
    {"max_tokens": 200, "padded": False},
    {"batch_size": 1, "packing": "bfd", "pack_length": 60},
    {"batch_size": 2, "packing": "wrapped", "pack_length": 23},
]
turns = st.tuples(st.text("a \n<|im_end|>é👋", max_size=8), st.sampled_from(WEIGHTS))


def expected_of(labels: list[int], weights: list[Any]) -> list[float]:
    """The weights of a row, from the labels of all of its answers: an answer is a run of labels."""
    made, number, inside = [], -1, False
    for label in labels:
        number += label != -100 and not inside
        inside = label != -100
        weight = 1 if weights[max(number, 0)] is None else weights[max(number, 0)]
        made.append(float(np.float32(weight)) if inside else 0.0)
    return made


def chat_of(row: list[tuple[str, Any]], **more: Any) -> dict[str, Any]:
    messages = [m for text, weight in row for m in (user(text, weight=7), answer(text, weight=weight))]
    return {"messages": messages, **more}


def flat(lists: Any) -> list[float]:
    return list(itertools.chain(*lists))


def of_rows(found: gpuload.ChatDataset) -> list[list[float]]:
    return [row["loss_weight"] for row in found[:]]


@pytest.mark.parametrize("template", ["default", QWEN3], ids=["answers found", "generation blocks"])
@pytest.mark.parametrize("form", ["JSON", "structs", "tools"])
@examples(15)
@given(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=6))
def test_each_answer_has_its_weight(qwen: Any, template: str, form: str, rows: list[list[tuple[str, Any]]]) -> None:
    rows = [[*row, ("x", 0.25)] for row in rows]  # no row is dropped
    more = {"tools": [TOOL]} if form == "tools" else {}
    options: dict[str, Any] = {"chat_template": template, "progress": False, "verify": "full", "strict": True}
    chats = [chat_of(row, **more) for row in rows]

    def load(loss_on: Any) -> gpuload.ChatDataset:
        if form == "structs":
            fields = [("role", pa.string()), ("content", pa.string()), ("weight", pa.float64())]
            kind = pa.list_(pa.struct(fields))
            return gpuload.load_chats(
                pa.table({"messages": pa.array([chat["messages"] for chat in chats], kind)}),
                qwen,
                loss_on=loss_on,
                **options,
            )
        return load_json(chats, qwen, loss_on=loss_on, **options)

    found, every = load(None), load("assistant")
    assert "loss_weight" not in every[0]
    weights = [
        expected_of(row["labels"], [weight for _, weight in given]) for row, given in zip(every[:], rows, strict=True)
    ]
    assert of_rows(found) == weights
    for row, some in zip(found[:], weights, strict=True):
        assert [label if weight else -100 for label, weight in zip(row["input_ids"], some, strict=True)] == row[
            "labels"
        ]
    assert found.loss_weights.values.dtype == np.float32
    assert found.loss_weights.values.tolist() == flat(weights)


ROWS = [[(f"text {k}" * (k % 5), WEIGHTS[(k + j) % 7]) for j in range(k % 3 + 1)] + [("x", 0.25)] for k in range(12)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    fields = [("role", pa.string()), ("content", pa.string()), ("weight", pa.float64())]
    chats = [chat_of(row)["messages"] for row in ROWS]
    pq.write_table(pa.table({"messages": pa.array(chats, pa.list_(pa.struct(fields)))}), tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


def check_batches(found: gpuload.ChatDataset) -> None:
    """The weights of batches are those of the rows with the same ids, and 0 where there is no label."""
    per_row = {tuple(row["input_ids"]): row["loss_weight"] for row in found[:]}
    for plan in PLANS:
        for batch in found.loader(**plan):
            weight, labels = batch["loss_weight"], batch["labels"]
            assert (weight.dtype, weight.shape) == (torch.float32, labels.shape)
            assert weight.is_contiguous()
            assert torch.equal(weight == 0, labels == -100)
            if "attention_mask" in batch:
                for ids, mask, some in zip(batch["input_ids"], batch["attention_mask"].bool(), weight, strict=True):
                    assert some[mask].tolist() == per_row[tuple(ids[mask].tolist())]
    (flat,) = found.loader(batch_size=1, packing="bfd", pack_length=4096)
    pieces = np.split(np.arange(flat["input_ids"].shape[1]), flat["cu_seq_lens_q"].tolist()[1:-1])
    for piece in pieces:
        ids, some = flat["input_ids"][0, piece].tolist(), flat["loss_weight"][0, piece].tolist()
        assert some == [0.0, *per_row[tuple(ids)][1:]]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_batches_stores_and_the_cache(qwen: Any, file: str, warm_cache: Path, store: Any) -> None:
    options: dict[str, Any] = {"store": store}
    first = gpuload.load_chats(file, qwen, **options)
    again = gpuload.load_chats(file, qwen, **options)
    assert again.report.from_cache == [file]
    assert "the loss of answers has weights (0.1, 0.25, 0.5, 2.5, 3): batches have a loss_weight" in first.report.notes
    for found in (first, again, pickle.loads(pickle.dumps(first))):
        assert of_rows(found) == of_rows(gpuload.load_chats(file, qwen))
        check_batches(found)
    short = gpuload.load_chats(file, qwen, max_length=45, overlong="keep_start")
    assert len(short) > 3
    assert {tuple(row) for row in of_rows(short)} <= {tuple(row[:45]) for row in of_rows(first)}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("tokens_on", ["device", "host"])
def test_on_a_device(qwen: Any, file: str, tokens_on: Any) -> None:
    found = load_chats_with(StreamKernels(), file, qwen, tokens_on=tokens_on, verify="full", strict=True)
    expected = gpuload.load_chats(file, qwen)
    assert of_rows(found) == of_rows(expected)
    check_batches(found)
    for plan in PLANS:
        for one, other in zip(found.loader(**plan), expected.loader(**plan), strict=True):
            assert torch.equal(one["loss_weight"].cpu(), other["loss_weight"])


def test_prompts_with_completions_and_sharegpt(qwen: Any) -> None:
    rows = [
        {"prompt": [user("a"), answer("b", weight=4)], "completion": [answer("c", weight=0.5)]},
        {"prompt": [user("a")], "completion": [answer("c"), user("d"), answer("e", weight=2)]},
    ]
    found = load_json(rows, qwen, loss_on="marked", verify="full", strict=True)
    assert [sorted({*row}) for row in of_rows(found)] == [[0, 0.5], [0, 1, 2]]
    turns = [{"from": "human", "value": "a", "weight": 9}, {"from": "gpt", "value": "b", "weight": 0.5}]
    found = load_json([{"conversations": turns}], qwen, verify="full", strict=True)
    assert sorted({*of_rows(found)[0]}) == [0, 0.5]
    assert "weights (0.5)" in str(found.report)


def test_arrow_and_exports(qwen: Any, file: str, tmp_path: Path) -> None:
    found = gpuload.load_chats(file, qwen)
    table = found.to_arrow().read_all()
    assert table.schema.field("loss_weight").type == pa.list_(pa.float32())
    assert table["loss_weight"].to_pylist() == of_rows(found)
    packs = found.to_arrow(packing="bfd", pack_length=4096).read_all()
    assert sorted(flat(packs["loss_weight"].to_pylist())) == sorted(flat(of_rows(found)))
    gpuload.save_to_disk({"train": found}, tmp_path / "made")
    assert pq.read_table(tmp_path / "made/train.parquet")["loss_weight"].to_pylist() == of_rows(found)
    for trainer in ("llamafactory", "axolotl", "skyrl", "areal"):
        with pytest.raises(OptionError, match=f"trainer='{trainer}': .* weights .* loss_on='assistant'"):
            found.to_arrow(trainer=trainer)  # type: ignore[arg-type]
        gpuload.load_chats(file, qwen, loss_on="assistant").to_arrow(trainer=trainer)  # type: ignore[arg-type]


def test_nothing_changes_without_weights(qwen: Any) -> None:
    """Weights 0 and 1, and those of users, add nothing."""
    chats = [chat_of([("a", 1), ("b", 0)]), chat_of([("a", 1.0), ("b", None)])]
    found = load_json(chats, qwen)
    assert found.report.notes[0] == "format: messages, loss on marked"
    assert "loss_weight" not in found[0]
    assert "loss_weight" not in found.batch([0, 1])
    assert found.to_arrow().schema.names == ["input_ids", "labels"]
    assert found.loss_weights.values.tolist() == found.loss_mask.values.astype(float).tolist()


def test_different_weights_in_one_answer_are_an_error_of_the_row(qwen: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u><a>{% else %}{{ m.content }}"
        "{% if loop.last or loop.nextitem.role == 'user' %}</a>{% endif %}{% endif %}{% endfor %}"
    )
    rows = [{"messages": [user("q"), answer("a", weight=0.5), answer("b", weight=weight)]} for weight in (2, 0.5)]
    found = load_json(rows, qwen, chat_template=template)
    assert len(found) == 1
    (why,) = found.report.rejected
    assert "messages with different weights are one answer" in why


def test_too_many_weights(qwen: Any) -> None:
    def rows(count: int) -> list[dict[str, Any]]:
        return [chat_of([("a", 2 + k / 8)]) for k in range(count)]

    found = load_json(rows(127), qwen)
    assert [max(row) for row in of_rows(found)] == [2 + k / 8 for k in range(127)]
    with pytest.raises(DataError, match="rows.jsonl: messages have more than 127 different weights .*: round them"):
        load_json(rows(128), qwen)


def test_ids_reach_no_bit_of_weights() -> None:
    class Large:
        vocab_size = 2**21 + 1
        added_tokens_decoder = ()

        def __len__(self) -> int:
            return self.vocab_size

    with pytest.raises(TokenizerError, match="the id 2,097,152, and ids up to 2,097,151 are supported"):
        check_vocabulary(Large())


def test_length_of_a_vocabulary_is_not_asked_for(qwen: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(qwen), "__len__", None)
    assert Reference(qwen, pad_token_id=qwen.vocab_size - 1).pad_token_id == qwen.vocab_size - 1
