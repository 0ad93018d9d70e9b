"""The integration with Automodel without Automodel: its masks, and which of Automodel's names it uses."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from automodel_cases import CHATS, TOOL, assistant, chat, mask_by_lengths, system, user, write_rows
from cache_cases import flip_a_bit
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import OptionError
from gpuload.core.marks import LOSS, split
from gpuload.integrations.automodel import masks
from gpuload.integrations.automodel.masks import Chat, marked
from gpuload.integrations.known_code import digest
from gpuload.integrations.messages import cache as message_cache

trl = pytest.importorskip("trl", reason="its templates are tested")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ANSWER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
EOS = """{% for m in messages %}<|im_start|>{{ m.role }}<|fim_pad|>{{ m.content }}
{%- if loop.last %}<|im_end|>{% else %}<|endoftext|>{% endif %}{% endfor %}"""
BY_CHARACTER = "{% for m in messages %}{{ m.content }}{% endfor %}"


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def with_template(qwen_folder: str, text: str | None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = text or tokenizer.chat_template
    return tokenizer


def by_columns(tokenizer: Any, chats: list[list[dict[str, Any]]], blocks: bool = False) -> list[Any]:
    """Ids and mask of each conversation, None where there are none."""
    found = marked([Chat(row, messages) for row, messages in enumerate(chats)], tokenizer, blocks, {})
    assert set(found.fallback) == set(np.flatnonzero(found.ids.lengths == 0).tolist())
    ids, loss = (part.to_lists() for part in split(found.ids))
    return [None if row in found.fallback else (ids[row], loss[row]) for row in range(len(chats))]


def expected_of(tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    """Ids and mask; None for a conversation that Automodel prepares itself, because a part of it has no tokens."""
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or not all("".join(m["content"] for m in messages[:k]) for a in answers for k in (a, a + 1)):
        return None
    return mask_by_lengths(tokenizer, messages)


@pytest.mark.parametrize(
    ("text", "least"),
    [(None, 24), (template("qwen3"), 3), (template("glm4moe"), 2), (ANSWER, 20), (EOS, 20), (BY_CHARACTER, 3)],
)
def test_masks_by_lengths(qwen_folder: str, text: str | None, least: int) -> None:
    tokenizer = with_template(qwen_folder, text)
    chats = [[m | {"content": m["content"] or "x"} for m in messages] for messages in CHATS]
    found = by_columns(tokenizer, chats)
    assert found == [mask_by_lengths(tokenizer, messages) for messages in chats]
    assert sum(row is not None for row in found) >= least


def test_masks_of_blocks_are_those_of_transformers(qwen_folder: str) -> None:
    tokenizer = with_template(qwen_folder, template("qwen3_training"))
    for messages, found in zip(CHATS, by_columns(tokenizer, CHATS, blocks=True), strict=True):
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert found == (made["input_ids"], [bit == 1 for bit in made["assistant_masks"]])


TEXT = st.text(st.sampled_from("a \n<|im_end|>é你"), max_size=12)


@examples(6)
@given(st.lists(st.lists(st.tuples(st.sampled_from("sua"), TEXT), min_size=1, max_size=5), min_size=1, max_size=6))
def test_masks_of_any_conversation(qwen_folder: str, rows: list[list[tuple[str, str]]]) -> None:
    tokenizer = with_template(qwen_folder, BY_CHARACTER)
    make = {"s": system, "u": user, "a": assistant}
    chats = [[make[role](text) for role, text in row] for row in rows] + [[user("q"), assistant("a")]]
    for messages, found in zip(chats, by_columns(tokenizer, chats), strict=True):
        assert found == expected_of(tokenizer, messages)


def test_many_conversations_are_tokenized_in_parts(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_columns(qwen, CHATS)
    monkeypatch.setattr(masks, "_AT_ONCE", 20)
    assert by_columns(qwen, CHATS) == whole
    assert by_columns(qwen, [[user("no answer")]]) == [None]


# -- a stand-in for Automodel, with only what the integration uses ---------------------------------------------------


class NeMoAutoTokenizerWithBosEosEnforced:
    """Automodel's class; none of the tokenizers here is one."""


class StockChatDataset:
    """Reads rows; its own rows only say where they come from."""

    def __init__(self, path_or_dataset_id: str, tokenizer: Any, **settings: Any) -> None:
        given = {"seq_length": None, "padding": "do_not_pad", "truncation": "do_not_truncate", "unshifted": False}
        given |= dict.fromkeys(("mask_reasoning_content", "mask_generation_prompt", "mask_history"), False)
        vars(self).update(given | settings)
        self.tokenizer, self.pad_token_id = tokenizer, tokenizer.pad_token_id
        self.dataset = [json.loads(line) for line in Path(path_or_dataset_id).read_text().splitlines()]
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        self.asked.append(idx)
        row = self.dataset[idx]
        made = mask_by_lengths(self.tokenizer, row["messages"], row.get("tools"))
        if made is None:
            raise ValueError("not a prefix")
        ids, mask = made
        labels = [token if bit else -100 for token, bit in zip(ids, mask, strict=True)]
        return {
            "input_ids": ids[:-1],
            "labels": labels[1:],
            "attention_mask": [1] * (len(ids) - 1),
            "___PAD_TOKEN_IDS___": {"input_ids": self.pad_token_id, "labels": -100, "attention_mask": 0},
        }

    @staticmethod
    def _keep_last_supervised_run(seq: list[int], unsupervised_value: int) -> None:
        seq[: len(seq) // 2] = [unsupervised_value] * (len(seq) // 2)


@pytest.fixture
def dataset_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the dataset, over the stand-in."""
    tokenization = "nemo_automodel._transformers.tokenization.nemo_auto_tokenizer"
    llm = "nemo_automodel.components.datasets.llm"
    contents: dict[str, dict[str, Any]] = {
        llm: {"ChatDataset": StockChatDataset},
        tokenization: {"NeMoAutoTokenizerWithBosEosEnforced": NeMoAutoTokenizerWithBosEosEnforced},
        f"{llm}.chat_dataset": {
            "ChatDataset": StockChatDataset,
            "_normalize_messages": lambda messages: messages,
            "_conversations_to_messages": lambda turns: [user("a"), assistant("b")],
        },
        f"{llm}.formatting_utils": {
            "GENERATION_REGEX": re.compile(r"\{%-?\s+generation\s+-?%\}"),
            "_package_tokenized_example": lambda **given: given,
        },
    }
    for name in sorted(
        {".".join(whole.split(".")[:k]) for whole in contents for k in range(1, len(whole.split(".")) + 1)}
    ):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    known = {"stand-in:StockChatDataset.__getitem__": {str(digest(StockChatDataset.__getitem__)): "0.7.0"}}
    monkeypatch.setattr("gpuload.integrations.automodel.contract.KNOWN", known)
    own = "gpuload.integrations.automodel.dataset"
    monkeypatch.delitem(sys.modules, own, raising=False)
    yield importlib.import_module(own)
    sys.modules.pop(own, None)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path / "rows.jsonl", [{"messages": messages} for messages in CHATS])


def test_rows_have_the_keys_and_types_of_automodel(dataset_module: Any, rows: str, qwen: Any) -> None:
    dataset = dataset_module.AutomodelChatDataset(rows, qwen, gpuload={"device": "cpu"})
    assert isinstance(dataset, StockChatDataset)
    sampled = set(dataset.asked)
    dataset.asked.clear()
    found = [dataset[row] for row in range(len(dataset))]
    assert dataset.asked == []
    assert sampled < set(range(len(CHATS)))
    assert found == [StockChatDataset.__getitem__(dataset, row) for row in range(len(CHATS))]
    assert {type(value) for row in found for name in ("input_ids", "labels") for value in row[name]} == {int}
    assert dataset[-1] == found[-1]
    with pytest.raises(IndexError):
        dataset[len(CHATS)]


def test_other_formats_are_made_by_functions_of_automodel(
    dataset_module: Any, rows: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in does not pad, and its function returns its arguments: there is nothing that a sample could compare.
    monkeypatch.setattr(dataset_module.AutomodelChatDataset, "_difference", lambda *given: None)
    given = dataset_module.AutomodelChatDataset(rows, qwen, seq_length=64, padding="max_length")[0]
    assert len(given["input_ids"]) == len(given["assistant_masks"]) == 64
    assert given["input_ids"][-1] == qwen.pad_token_id
    assert {"eos_token_id", "pad_token_id", "seq_length", "truncation", "padding", "unshifted", "tokenizer"} < set(
        given
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mask_generation_prompt": True}, "mask_generation_prompt is set"),
        ({"truncation": "only_second", "seq_length": 9}, "truncation='only_second' is not supported"),
        ({"truncation": None, "seq_length": 9}, "truncation=None is not supported"),
        ({"padding": "other"}, "padding='other' is not supported"),
        ({"truncation": True}, "rows are truncated or padded without seq_length"),
    ],
)
def test_what_is_not_supported_falls_back(
    dataset_module: Any, rows: str, qwen: Any, caplog: pytest.LogCaptureFixture, given: dict[str, Any], why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = dataset_module.AutomodelChatDataset(rows, qwen, **given)
    assert f"falls back to Automodel's ChatDataset: {why}" in caplog.text
    _ = dataset[3]
    assert dataset.asked == [3]


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("nemo_automodel.components.datasets.llm.formatting_utils", None, "cannot be imported"),
        ("nemo_automodel.components.datasets.llm.chat_dataset", "_normalize_messages", "has no _normalize_messages"),
        (
            "nemo_automodel._transformers.tokenization.nemo_auto_tokenizer",
            "NeMoAutoTokenizerWithBosEosEnforced",
            "has no NeMoAutoTokenizerWithBosEosEnforced",
        ),
    ],
)
def test_a_private_part_that_has_moved_falls_back(
    dataset_module: Any, rows: str, qwen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    module: str, name: str | None, why: str,
) -> None:  # fmt: skip
    if name is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(sys.modules[module], name)
    dataset = importlib.reload(dataset_module).AutomodelChatDataset(rows, qwen)
    assert dataset._rows is None
    (line,) = caplog.messages
    assert line.startswith(f"gpuload: falls back to Automodel's ChatDataset: {module} {why}")
    _ = dataset[3]
    assert dataset.asked == [3]


CHANGE = "Automodel: StockChatDataset.__getitem__ has changed"


def test_code_that_is_not_known_is_compared(
    dataset_module: Any, tmp_path: Path, qwen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "KNOWN", {})
    monkeypatch.setattr(dataset_module, "release_of", lambda package, name: name)
    plain = {"messages": [user("q"), assistant("a")]}
    rows = [plain] * 300
    rows[217] = plain | {"tools": [TOOL]}
    rows[111] = {"messages": [system("s"), *plain["messages"]]}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    dataset = dataset_module.AutomodelChatDataset(path, qwen)
    assert dataset._rows is not None
    assert {111, 217} < set(dataset.asked)
    assert len(dataset.asked) == 64
    assert caplog.messages[-1] == f"gpuload: {CHANGE}; 64 rows prepared by both are equal: used"
    # A change for rows with tools only.
    stock = StockChatDataset.__getitem__

    def changed(self: Any, idx: int) -> Any:
        return {"input_ids": []} if self.dataset[idx].get("tools") else stock(self, idx)

    changed.__qualname__ = stock.__qualname__
    monkeypatch.setattr(StockChatDataset, "__getitem__", changed)
    assert dataset_module.AutomodelChatDataset(path, qwen)[217] == {"input_ids": []}
    why = f"{CHANGE}, and row 217 of a sample differs from Automodel's"
    assert caplog.messages[-1] == f"gpuload: falls back to Automodel's ChatDataset: {why}"


def test_a_sample_that_differs_falls_back(
    dataset_module: Any, rows: str, qwen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StockChatDataset, "__getitem__", lambda self, idx: {"input_ids": []})
    dataset = dataset_module.AutomodelChatDataset(rows, qwen)
    assert dataset[0] == {"input_ids": []}
    assert "of a sample differs from Automodel's" in caplog.text


def test_several_chat_templates(dataset_module: Any, rows: str, qwen: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = copy.deepcopy(qwen)
    tokenizer.chat_template = {"default": qwen.chat_template, "tool_use": qwen.chat_template}
    assert dataset_module.AutomodelChatDataset(rows, tokenizer)._rows is None
    assert "falls back to Automodel's ChatDataset: the tokenizer has several chat templates" in caplog.text


def test_rows_that_automodel_prepares_itself(
    dataset_module: Any, tmp_path: Path, qwen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"messages": CHATS[row], "tools": [TOOL] if row % 2 else None} for row in range(4)]
    broken = [{"messages": chat(2), "tools": "{"}, {"messages": "text"}, {"messages": [user("no answer")]}]
    dataset = dataset_module.AutomodelChatDataset(write_rows(tmp_path / "rows.jsonl", [*good, *broken]), qwen)
    assert "Automodel prepares 3 of 7 rows itself, when they are read" in caplog.text
    dataset.asked.clear()
    assert [dataset[row] for row in range(4)] == [StockChatDataset.__getitem__(dataset, row) for row in range(4)]
    assert dataset.asked == [0, 1, 2, 3]  # by the line above only
    _ = dataset[6]
    assert dataset.asked[4:] == [6]


def test_settings_are_checked(dataset_module: Any, rows: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match=r"unknown key dataset.gpuload.devise: did you mean device\?"):
        dataset_module.AutomodelChatDataset(rows, qwen, gpuload={"devise": "cpu"})


@pytest.fixture
def made(dataset_module: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations were tokenized, each time."""
    counts: list[int] = []

    def counted(chats: Any, *given: Any) -> Any:
        counts.append(len(chats))
        return marked(chats, *given)

    monkeypatch.setattr(dataset_module, "marked", counted)
    return counts


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("damage", [False, True])
def test_a_second_start_finds_the_rows(
    store: str, damage: bool, dataset_module: Any, made: list[int], rows: str, qwen: Any, warm_cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    given = {"store": store, "device": "cpu"}
    first = dataset_module.AutomodelChatDataset(rows, qwen, gpuload=given)
    (entry,) = (warm_cache.parent / "store" if store == "disk" else warm_cache).glob("*.arrow")
    if damage:
        flip_a_bit(entry)
    caplog.clear()
    second = dataset_module.AutomodelChatDataset(rows, qwen, gpuload=given)
    assert made == [len(CHATS)] * (1 + damage)
    expected = [StockChatDataset.__getitem__(second, row) for row in range(len(CHATS))]
    others = [message for message in caplog.messages if "itself, when they are read" in message]
    assert [first[row] for row in range(len(CHATS))] == [second[row] for row in range(len(CHATS))] == expected
    assert (type(second._rows) is DiskTokens) == (store == "disk")
    second._rows = pickle.loads(pickle.dumps(second._rows))
    assert [second[row] for row in range(len(CHATS))] == expected
    third = dataset_module.AutomodelChatDataset(rows, qwen, gpuload={"token_cache": False})
    assert [third[row] for row in range(len(third))] == expected
    assert len(made) == 2 + damage
    assert [message for message in caplog.messages if "itself, when they are read" in message] == [*others, *others]


@pytest.mark.parametrize("other", ["messages", "tools", "broken", "template", "code"])
def test_other_rows_are_not_found(
    other: str, dataset_module: Any, made: list[int], tmp_path: Path, qwen: Any, warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given: list[Any] = [{"messages": messages, "tools": None} for messages in CHATS]
    path = write_rows(tmp_path / "rows.jsonl", given)
    dataset_module.AutomodelChatDataset(path, qwen)
    if other == "messages":
        given[3] = {"messages": [user("another"), assistant("row")], "tools": None}
    elif other == "tools":
        given[3] = {**given[3], "tools": [TOOL]}
    elif other == "broken":
        given[3] = {"messages": "text", "tools": None}
    elif other == "template":
        monkeypatch.setattr(qwen, "chat_template", "{# another #}" + qwen.chat_template)
    else:
        monkeypatch.setattr(message_cache, "digest", lambda function: "another")
    path = write_rows(tmp_path / "rows.jsonl", given)
    dataset_module.AutomodelChatDataset(path, qwen)
    count = len(CHATS) - (other == "broken")
    assert made == [len(CHATS), count]
    dataset_module.AutomodelChatDataset(path, qwen)
    assert made == [len(CHATS), count]


def test_rows_that_are_not_json_are_prepared_by_automodel(
    dataset_module: Any, tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages} for messages in CHATS])
    original = dataset_module.STOCK["_normalize_messages"]

    def dated(messages: list[Any]) -> list[Any]:
        made = original(messages)
        return [{**message, "at": date(2026, 1, 2)} for message in made] if messages == CHATS[3] else made

    monkeypatch.setattr(dataset_module, "STOCK", dataset_module.STOCK | {"_normalize_messages": dated})
    dataset = dataset_module.AutomodelChatDataset(path, qwen)
    dataset.asked.clear()
    found = [dataset[row] for row in range(len(CHATS))]
    assert 3 in dataset.asked
    assert found == [StockChatDataset.__getitem__(dataset, row) for row in range(len(CHATS))]
    assert "a value has the type date, which JSON has not" in caplog.text


def test_an_entry_that_differs_from_automodel_is_made_again(
    dataset_module: Any, made: list[int], rows: str, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = message_cache.RowCache.add

    def wrong(self: Any, ids: Ragged, *rest: Any) -> None:
        add(self, Ragged(ids.values ^ LOSS, ids.offsets), *rest)

    monkeypatch.setattr(message_cache.RowCache, "add", wrong)
    dataset_module.AutomodelChatDataset(rows, qwen)
    monkeypatch.setattr(message_cache.RowCache, "add", add)
    dataset = dataset_module.AutomodelChatDataset(rows, qwen)
    assert [dataset[row] for row in range(len(CHATS))] == [
        StockChatDataset.__getitem__(dataset, row) for row in range(len(CHATS))
    ]
    assert made == [len(CHATS)] * 2
    dataset_module.AutomodelChatDataset(rows, qwen)
    assert made == [len(CHATS)] * 2
