"""The integration with NeMo-RL without NeMo-RL: rows, and which of NeMo-RL's names it uses."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from cache_cases import flip_a_bit
from datasets import Dataset
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tiers import examples

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError, OptionError, StoreError, TokenizerError
from gpuload.integrations.comparison import comparable
from gpuload.integrations.known_code import digest
from gpuload.integrations.messages import cache as message_cache
from gpuload.integrations.messages.cache import StoredRows
from gpuload.integrations.messages.rows import SharedRows
from gpuload.integrations.nemo_rl import conversations
from gpuload.integrations.nemo_rl.conversations import (
    ConversationProcessor,
    FormattedChats,
    MessageSettings,
    NemoConversations,
    templates_of,
    tokenized_conversations,
)
from gpuload.integrations.nemo_rl.rows import identity, tokenized
from gpuload.sources.columns import Columns

PIECES = ["a", " ", "\n", "é", "è", "你", "👋", "<|im_end|>", "<|im_start|>"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
TEXTS = ["What is 2+2?", "", "你好 é\n", "<|im_end|>", "long " * 40]


def processor(row: Any, spec: Any, tokenizer: Any, limit: int, idx: int) -> dict[str, Any]:
    """A row as NeMo-RL's processor makes it, with its keys and types."""
    system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
    problem = row["messages"][0]["content"]
    text = spec.prompt.format(problem) if spec.prompt else problem
    chat = [*system, {"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    too_long = len(ids) >= limit
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids[: min(4, limit)] if too_long else ids}],
        "length": len(ids),
        "extra_env_info": {"ground_truth": row["messages"][1]["content"]},
        "loss_multiplier": 0.0 if too_long else 1.0,
        "idx": idx,
        "task_name": row["task_name"],
    }


def sft_processor(
    row: Any, spec: Any, tokenizer: Any, limit: int, idx: int, add_bos: bool = True, add_eos: bool = True,
    add_generation_prompt: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A row as NeMo-RL's processor for SFT makes it."""
    log, before, chat = [], "", row["messages"]
    if spec is not None and spec.prompt:
        first = next((k for k, message in enumerate(chat) if message["role"] == "user"), 0)
        text = spec.prompt.format(chat[first]["content"])
        chat = [*chat[:first], {"role": "user", "content": text}, *chat[first + 1 :]]
    for k, message in enumerate(chat):
        generates = add_generation_prompt and message["role"] in ("user", "tool")
        more = {} if row.get("tools") is None else {"tools": row["tools"]}
        whole = tokenizer.apply_chat_template(chat[: k + 1], tokenize=False, add_generation_prompt=generates, **more)
        text = whole[
            next(
                (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
            ) :
        ]
        if k == 0 and add_bos and tokenizer.bos_token and not text.startswith(tokenizer.bos_token):
            text = tokenizer.bos_token + text
        if k == len(chat) - 1 and add_eos and not text.rstrip("\n").endswith(tokenizer.eos_token):
            text += tokenizer.eos_token
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        log.append({**message, "content": text, "token_ids": ids})
        before = whole
    length = sum(len(message["token_ids"]) for message in log)
    for message in log if length >= limit else []:
        message["token_ids"] = message["token_ids"][: min(4, limit // len(log))]
    loss = 0.0 if length >= limit else 1.0
    return {"message_log": log, "length": length, "extra_env_info": None, "loss_multiplier": loss, "idx": idx}


def other_processor(row: Any, spec: Any, tokenizer: Any, limit: int, idx: int) -> dict[str, Any]:
    return {"row": row}


class StandIn:
    """`ResponseDataset` with only what the integration uses. NeMo-RL calls the methods in this order."""

    def __init__(self, data_path: str, chosen: Any = processor, **settings: Any) -> None:
        chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": f"a{t}"}] for t in TEXTS]
        self.dataset: Any = Dataset.from_list([{"messages": chat, "task_name": "task"} for chat in chats])
        self.val_dataset: Any = self.dataset.select([1, 0])
        self.task_name, self.chosen = "task", chosen

    def set_task_spec(self, data_config: dict[str, Any]) -> None:
        self.data_config = data_config
        self.task_spec = SimpleNamespace(prompt="Solve: {}", system_prompt="Be brief.")

    def set_processor(self) -> None:
        self.processor = self.chosen


TURNS = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant", "tool"]), TEXT
)


class ChatStandIn(StandIn):
    """`OpenAIFormatDataset` with only what the integration uses."""

    rows: Sequence[Any] = ()

    def __init__(self, data_path: str, **settings: Any) -> None:
        self.dataset = Dataset.from_list([{"messages": chat, "task_name": "task"} for chat in self.rows])
        self.task_name, self.chosen = "task", sft_processor


def get_tokenizer(section: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(section["name"])
    if kwargs := section.get("chat_template_kwargs"):
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **kwargs)
    return tokenizer


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the dataset, over the stand-in."""
    contents: dict[str, dict[str, Any]] = {
        "nemo_rl.algorithms.utils": {"get_tokenizer": get_tokenizer},
        "nemo_rl.data.processors": {"math_hf_data_processor": processor, "sft_processor": sft_processor},
        "nemo_rl.data.datasets.response_datasets": {"OpenAIFormatDataset": ChatStandIn, "ResponseDataset": StandIn},
    }
    for name in sorted(
        {".".join(whole.split(".")[: k + 1]) for whole in contents for k in range(whole.count(".") + 1)}
    ):
        made = ModuleType(name)
        vars(made).update(contents.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
    known = {f"stand-in:{each.__name__}": {str(digest(each)): "0.7.0"} for each in (processor, sft_processor)}
    monkeypatch.setattr("gpuload.integrations.nemo_rl.contract.KNOWN", known)
    own = "gpuload.integrations.nemo_rl.dataset"
    monkeypatch.delitem(sys.modules, own, raising=False)
    yield importlib.import_module(own)
    sys.modules.pop(own, None)


def made(module: Any, tokenizer: Any, **config: Any) -> Any:
    dataset = module.NemoPromptDataset(data_path="x", tokenizer=tokenizer, **config)
    dataset.set_task_spec({"processor": "default"})
    dataset.set_processor()
    return dataset


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": False}])
def test_rows_are_those_of_the_processor(module: Any, qwen_folder: str, kwargs: Any) -> None:
    section = {"name": qwen_folder, "chat_template_kwargs": kwargs}
    dataset, stock = made(module, section), StandIn("x")
    tokenizer = get_tokenizer(section)
    for found, expected in ((dataset.dataset, stock.dataset), (dataset.val_dataset, stock.val_dataset)):
        assert len(found) == len(expected)
        for limit in (3, 40, 4096):
            for row in range(len(found)):
                one = dataset.processor(found[row], dataset.task_spec, tokenizer, limit, row)
                other = processor(expected[row], dataset.task_spec, tokenizer, limit, row)
                assert list(one) == list(other)
                assert comparable(one) == comparable(other)
    with pytest.raises(IndexError):
        _ = dataset.dataset[len(TEXTS)]


def test_long_prompts_are_dropped(module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = get_tokenizer({"name": qwen_folder})
    spec = SimpleNamespace(prompt="Solve: {}", system_prompt="Be brief.")
    rows = StandIn("x").dataset
    longest = max(processor(row, spec, tokenizer, 4096, 0)["length"] for row in rows)
    kept = made(module, {"name": qwen_folder}, max_input_seq_length=longest + 1).dataset
    assert len(kept) == len(TEXTS)
    kept = made(module, {"name": qwen_folder}, max_input_seq_length=longest).dataset
    assert [row["ground_truth"] for row in kept] == [f"a{text}" for text in TEXTS[:-1]]
    assert f"dropped 1 of 5 rows with max_input_seq_length={longest} tokens or more" in caplog.text


def test_another_processor_falls_back(module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = made(module, {"name": qwen_folder}, chosen=other_processor)
    assert dataset.processor is other_processor
    assert "falls back to NeMo-RL for task: the processor default is not supported" in caplog.text


def test_prompts_whose_content_is_not_text(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "content": "a"}]
    made_by_nemo = StandIn.__init__

    def with_parts(self: Any, *given: Any, **named: Any) -> None:
        made_by_nemo(self, *given, **named)
        self.dataset = [*self.dataset, {"messages": parts, "task_name": "task"}]

    monkeypatch.setattr(StandIn, "__init__", with_parts)
    assert made(module, {"name": qwen_folder}).processor is processor
    assert "falls back to NeMo-RL for task: the content of a message is not text" in caplog.text


def test_a_tokenizer_that_is_not_supported_falls_back(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(*_: Any) -> Any:
        raise TokenizerError("the tokenizer has no chat template")

    monkeypatch.setattr(module, "tokenized", rejected)
    assert made(module, {"name": qwen_folder}).processor is processor
    assert "falls back to NeMo-RL for task: the tokenizer has no chat template" in caplog.text


@pytest.mark.parametrize(
    ("home", "name", "why"),
    [
        ("nemo_rl.algorithms.utils", None, "cannot be imported"),
        ("nemo_rl.data.processors", "sft_processor", "has no sft_processor"),
    ],
)
def test_a_part_that_has_moved_falls_back(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    home: str, name: str | None, why: str,
) -> None:  # fmt: skip
    if name is None:
        monkeypatch.setitem(sys.modules, home, None)
    else:
        monkeypatch.delattr(sys.modules[home], name)
    dataset = made(importlib.reload(module), {"name": qwen_folder})
    assert dataset.processor is processor
    assert len(dataset.dataset) == len(TEXTS)
    (line,) = caplog.messages
    assert line.startswith(f"gpuload: falls back to NeMo-RL for task: {home} {why}")


def test_code_that_is_not_known_is_compared(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN", {})
    monkeypatch.setattr(module, "release_of", lambda package, name: name)
    dataset = made(module, {"name": qwen_folder})
    assert dataset.processor is not processor
    change = "NeMo-RL: processor has changed"
    assert [line for line in caplog.messages if "changed" in line] == [
        f"gpuload: {change}; 5 rows prepared by both are equal: used",
        f"gpuload: {change}; 2 rows prepared by both are equal: used",
    ]
    monkeypatch.setattr("gpuload.integrations.comparison._OF_KNOWN_CODE", 1)  # rows of every shape are taken

    def changed(row: Any, *given: Any) -> Any:
        return processor(row, *given) | ({"length": 0} if row["messages"][0]["content"] == TEXTS[2] else {})

    changed.__qualname__ = "processor"
    monkeypatch.setitem(module.STOCK, "math_hf_data_processor", changed)
    assert made(module, {"name": qwen_folder}, chosen=changed).processor is changed
    why = f"{change}, and row 2 of a sample differs from NeMo-RL's"
    assert caplog.messages[-1] == f"gpuload: falls back to NeMo-RL for task: {why}"


def test_what_is_rejected(module: Any, qwen_folder: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match="data.train.tokenizer=None: expected the section of the policy"):
        made(module, None)
    with pytest.raises(OptionError, match="data.train.max_input_seq_length=1: expected an integer > 1"):
        made(module, {"name": qwen_folder}, max_input_seq_length=1)
    with pytest.raises(OptionError, match="unknown key data.train.gpuload.x"):
        made(module, {"name": qwen_folder}, gpuload={"x": 1})
    dataset = made(module, {"name": qwen_folder})
    other = get_tokenizer({"name": qwen_folder})
    other.chat_template = "{{ messages[0].content }}"
    with pytest.raises(OptionError, match="the tokenizer of the policy is not the one of the dataset"):
        dataset.processor(dataset.dataset[0], dataset.task_spec, other, 99, 0)
    with pytest.raises(DataError, match="1 of 2 prompts cannot be tokenized"):
        tokenized([[{"role": "user", "content": "a"}], []], ["", ""], "task", qwen, {}, None, {})


# -- SFT -------------------------------------------------------------------------------------------------------------

SWITCHES = ("add_bos", "add_eos", "add_generation_prompt")
TEMPLATES = [
    None,
    "{% for m in messages %}[{{ m.role }}] {{ m.content|trim }}{% if loop.last %}!{% endif %}{% endfor %}\n",
    "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}",
]


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chats=st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=5),
    switches=st.tuples(*[st.booleans()] * 3),
    template=st.sampled_from(TEMPLATES),
    bos=st.sampled_from([None, "<|im_start|>"]),
)
def test_messages_are_those_of_the_processor(
    qwen_folder: str, chats: Any, switches: Any, template: Any, bos: Any
) -> None:
    tokenizer = get_tokenizer({"name": qwen_folder})
    tokenizer.chat_template, tokenizer.bos_token = template or tokenizer.chat_template, bos
    named = dict(zip(SWITCHES, switches, strict=True))
    made = conversations_of(chats, tokenizer, MessageSettings(**named))
    process = ConversationProcessor(identity(tokenizer), MessageSettings(**named))
    for row, chat in enumerate(chats):
        for limit in (7, 4096):
            expected = sft_processor({"messages": chat}, None, tokenizer, limit, row, **named)
            assert comparable(process(made[row], None, tokenizer, limit, row, **named)) == comparable(expected)


def conversations_of(chats: Any, tokenizer: Any, settings: MessageSettings) -> NemoConversations:
    rows, columns = tokenized_conversations(chats, tokenizer, templates_of(tokenizer, {}), settings, {}, {})
    stored = StoredRows(rows.ids, rows.fallback, columns=Columns([columns]))
    return NemoConversations.of(stored, chats, chats, "task", None)


def test_conversations_are_loaded_in_parts(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [[{"role": "user", "content": f"{row} {k}"} for k in range(row % 4 + 1)] for row in range(30)]
    whole = conversations_of(chats, qwen, MessageSettings())
    monkeypatch.setattr(conversations, "_AT_ONCE", 7)
    parts = conversations_of(chats, qwen, MessageSettings())
    assert [comparable(parts[row]) for row in range(30)] == [comparable(whole[row]) for row in range(30)]


def test_conversations_of_the_class(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in TEXTS]
    monkeypatch.setattr(ChatStandIn, "rows", chats)
    monkeypatch.setattr(
        ChatStandIn, "set_task_spec", lambda self, config: setattr(self, "task_spec", SimpleNamespace(prompt=None))
    )
    section, tokenizer = {"name": qwen_folder}, get_tokenizer({"name": qwen_folder})

    def chats_of(**config: Any) -> Any:
        dataset = module.NemoChatDataset(data_path="x", tokenizer=section, **config)
        dataset.set_task_spec({})
        dataset.set_processor()
        return dataset

    dataset = chats_of()
    assert len(dataset.dataset) == len(chats)
    for row, chat in enumerate(chats):
        expected = sft_processor({"messages": chat}, None, tokenizer, 50, row)
        assert comparable(
            dataset.processor(dataset.dataset[row], None, tokenizer, 50, row, add_eos=True)
        ) == comparable(expected)
    with pytest.raises(OptionError, match=r"data.add_eos=False, but .* with True: set \+data.train.add_eos="):
        dataset.processor(dataset.dataset[0], None, tokenizer, 50, 0, add_eos=False)
    with pytest.raises(OptionError, match="data.train.add_bos='yes': expected true or false"):
        chats_of(add_bos="yes")
    length = sft_processor({"messages": chats[-1]}, None, tokenizer, 4096, 0)["length"]
    assert len(chats_of(max_input_seq_length=length).dataset) == len(chats) - 1
    assert f"dropped 1 of 5 rows with max_input_seq_length={length} tokens or more" in caplog.text


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


def test_rows_that_nemo_rl_tokenizes_itself(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in TEXTS] * 5
    odd = [[], [{"role": "raise", "content": "x"}]]
    rows = [{"messages": chat, "task_name": "task", "tools": TOOLS[: n % 3]} for n, chat in enumerate(chats + odd)]
    rows[3]["tools"], rows[4]["tools"] = tuple(TOOLS), None
    section, tokenizer = {"name": qwen_folder}, get_tokenizer({"name": qwen_folder})
    tokenizer.chat_template = "{% if messages[0].role == 'raise' %}{{ raise_exception('no') }}{% endif %}" + (
        tokenizer.chat_template
    )

    def loaded(given: list[Any]) -> Any:
        monkeypatch.setattr(ChatStandIn, "__init__", lambda self, data_path, **settings: vars(self).update(
            dataset=given, task_name="task", chosen=sft_processor))  # fmt: skip
        monkeypatch.setattr(
            ChatStandIn, "set_task_spec", lambda self, config: setattr(self, "task_spec", SimpleNamespace(prompt=None))
        )
        monkeypatch.setitem(module.STOCK, "get_tokenizer", lambda section: tokenizer)
        dataset = module.NemoChatDataset(data_path="x", tokenizer=section, max_input_seq_length=200)
        dataset.set_task_spec({})
        dataset.set_processor()
        return dataset

    dataset = loaded(rows)
    assert type(dataset.processor) is ConversationProcessor
    reasons = "its tools are not a list of objects (1); the content of a message is not text (1); no (1)"
    assert f"NeMo-RL prepares 3 of 27 rows itself, when they are read: {reasons}" in caplog.text
    assert "dropped 1 of 27 rows with max_input_seq_length=200 tokens or more" in caplog.text
    numbers = [row for row in range(27) if row != 14]
    assert dataset.dataset.numbers.tolist() == numbers
    assert np.setdiff1d(numbers, dataset.dataset.tokenized).tolist() == [3, 25, 26]
    for place, row in enumerate(numbers[:-1]):
        expected = sft_processor(rows[row], None, tokenizer, 99, place)
        assert comparable(dataset.processor(dataset.dataset[place], None, tokenizer, 99, place)) == comparable(expected)
    with pytest.raises(Exception, match="no"):
        dataset.processor(dataset.dataset[25], None, tokenizer, 99, 25)
    assert loaded(rows[-1:]).processor is sft_processor
    assert "falls back to NeMo-RL for task: no" in caplog.messages[-1]


# -- SFT: the cache ----------------------------------------------------------------------------------------------------

CHATS = [[{"role": "user", "content": t}, {"role": "assistant", "content": f"a {n}"}] for n, t in enumerate(TEXTS * 5)]


def chat_rows() -> list[Any]:
    rows = [{"messages": chat, "task_name": "task", "tools": None} for chat in CHATS]
    rows[2] = {**rows[2], "tools": TOOLS}
    rows[4] = {**rows[4], "messages": []}  # NeMo-RL's own
    rows[6] = {**rows[6], "messages": [{"role": "user", "content": "q", "name": "x"}, *CHATS[6][1:]]}
    return rows


@pytest.fixture
def start(module: Any, qwen_folder: str, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """start(rows, limit=99, store="disk") → a dataset of these rows; `start.made` counts the conversations made."""
    tokenizer = get_tokenizer({"name": qwen_folder})
    own = tokenizer.chat_template

    def started(
        rows: list[Any], *, prompt: str | None = None, template: str | None = None, limit: int | None = None,
        switches: dict[str, bool] | None = None, **gpuload: Any,
    ) -> Any:  # fmt: skip
        monkeypatch.setattr(ChatStandIn, "__init__", lambda self, data_path, **settings: vars(self).update(
            dataset=rows, task_name="task", chosen=module.STOCK["sft_processor"]))  # fmt: skip
        spec = SimpleNamespace(prompt=prompt)
        monkeypatch.setattr(ChatStandIn, "set_task_spec", lambda self, config: setattr(self, "task_spec", spec))
        tokenizer.chat_template = template or own
        dataset = module.NemoChatDataset(
            data_path="x",
            tokenizer={"name": qwen_folder},
            max_input_seq_length=limit,
            gpuload=gpuload,
            **switches or {},
        )
        dataset.set_task_spec({})
        dataset.set_processor()
        return dataset

    def counted(chats: Any, *given: Any) -> Any:
        started.made.append(len(chats))  # type: ignore[attr-defined]
        return tokenized_conversations(chats, *given)

    started.made, started.tokenizer = [], tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(module.STOCK, "get_tokenizer", lambda section: tokenizer)
    monkeypatch.setattr(module, "tokenized_conversations", counted)
    return started


def rows_of(dataset: Any, tokenizer: Any, **switches: bool) -> list[Any]:
    """All rows but the one for which NeMo-RL raises an error."""
    numbers = [place for place, number in enumerate(dataset.dataset.numbers.tolist()) if number != 4]
    spec = dataset.task_spec
    return [comparable(dataset.processor(dataset.dataset[k], spec, tokenizer, 4096, k, **switches)) for k in numbers]


def expected_of(rows: list[Any], tokenizer: Any, **switches: bool) -> list[Any]:
    return [
        comparable(sft_processor(row, None, tokenizer, 4096, k, **switches)) for k, row in enumerate(rows) if k != 4
    ]


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("damage", [None, ".arrow", ".columns", "no columns"])
def test_a_second_start_finds_ids_and_texts(
    store: str, damage: str | None, start: Any, warm_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, folder = chat_rows(), warm_cache.parent / "store" if store == "disk" else warm_cache
    first = start(rows, store=store)
    entry, columns = sorted(folder.glob("*.*"))
    assert (entry.suffix, columns) == (".arrow", entry.with_suffix(".columns"))
    if damage == "no columns":
        columns.unlink()
    elif damage:
        flip_a_bit(entry.with_suffix(damage))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        second = start(rows, store=store)
    assert start.made == [25] * (1 + bool(damage))
    assert ("gpuload: rows are from the cache" in caplog.messages) == (not damage)
    assert sorted(folder.glob("*.*")) == [entry, columns]
    assert type(second.dataset.ids) is (DiskTokens if store == "disk" else SharedRows)
    assert type(second.dataset.chats) is (FormattedChats if store == "disk" else list)
    expected = expected_of(rows, start.tokenizer)
    assert rows_of(first, start.tokenizer) == rows_of(second, start.tokenizer) == expected
    # As the workers of a DataLoader get it.
    second.dataset = pickle.loads(pickle.dumps(second.dataset))
    assert rows_of(second, start.tokenizer) == expected
    assert dict(second.dataset.fallback) == {4: "the content of a message is not text"}
    start(rows, store=store)
    assert len(start.made) == 1 + bool(damage)
    assert rows_of(start(rows, token_cache=False, store=store), start.tokenizer) == expected
    assert len(start.made) == 2 + bool(damage)


def test_rows_without_a_place_in_the_cache_are_removed_with_the_dataset(start: Any, warm_cache: Path) -> None:
    folder = warm_cache.parent / "store"
    dataset = start(chat_rows(), token_cache=False, store="disk")
    assert {path.suffix for path in folder.rglob("*.columns")} == {".columns"}
    del dataset
    gc.collect()
    assert list(folder.glob("*")) == list(warm_cache.glob("*")) == []


def test_a_store_on_disk_takes_the_entry_of_the_token_cache(start: Any, warm_cache: Path) -> None:
    rows = chat_rows()
    start(rows)
    dataset = start(rows, store="disk")
    assert start.made == [25]
    assert list(warm_cache.glob("*")) == []
    assert rows_of(dataset, start.tokenizer) == expected_of(rows, start.tokenizer)
    assert rows_of(start(rows), start.tokenizer) == expected_of(rows, start.tokenizer)
    assert start.made == [25]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_another_limit_finds_the_same_rows(store: str, start: Any) -> None:
    rows = chat_rows()
    start(rows, store=store)
    lengths = [row["length"] for row in expected_of(rows, start.tokenizer)]
    found = start(rows, limit=max(lengths), store=store)
    assert start.made == [25]
    kept = [row for row in expected_of(rows, start.tokenizer) if row["length"] < max(lengths)]
    assert [{**row, "idx": 0} for row in rows_of(found, start.tokenizer)] == [{**row, "idx": 0} for row in kept]


@pytest.mark.parametrize(
    "other", ["messages", "fields", "tools", "own row", "prompt", "template", "tokenizer", "switch", "eos", "code"]
)
def test_other_conditions_are_not_found(
    other: str, start: Any, module: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, config, tokenizer = chat_rows(), dict[str, Any](), start.tokenizer
    start(rows)
    if other == "messages":
        rows[3] = {**rows[3], "messages": [{"role": "user", "content": "another"}, *CHATS[3][1:]]}
    elif other == "fields":
        rows[3] = {**rows[3], "messages": [{**CHATS[3][0], "name": "me"}, *CHATS[3][1:]]}
    elif other == "tools":
        rows[3] = {**rows[3], "tools": TOOLS[:1]}
    elif other == "own row":
        rows[4] = chat_rows()[3]
    elif other == "prompt":
        config = {"prompt": "Solve: {}"}
    elif other == "template":
        config = {"template": tokenizer.chat_template + "!"}
    elif other == "tokenizer":
        tokenizer.add_tokens(["ng l"])
    elif other == "switch":
        config = {"switches": {"add_generation_prompt": True}}
    elif other == "eos":
        tokenizer.eos_token = "<|endoftext|>"
    else:
        monkeypatch.setattr(message_cache, "digest", lambda function: "another")
    for _ in range(2):
        found = start(rows, **config)
        assert start.made == [25, 25]
        assert type(found.processor) is ConversationProcessor
        assert rows_of(found, tokenizer, **config.get("switches", {})) == [
            comparable(sft_processor(row, found.task_spec, tokenizer, 4096, k, **config.get("switches", {})))
            for k, row in enumerate(rows)
            if k != 4
        ]
    assert len(list(warm_cache.glob("*.columns"))) == len(list(warm_cache.glob("*.arrow"))) == 2


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("wrong", ["ids", "texts", "sizes"])
def test_an_entry_that_differs_from_nemo_rl_is_made_again(
    wrong: str, store: str, start: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, add = chat_rows(), message_cache.RowCache.add

    def added(self: Any, ids: Ragged, others: Any, rendering: Any, columns: pa.Table) -> None:
        if wrong == "ids":
            ids = Ragged(ids.values ^ 1, ids.offsets)
        else:
            values = columns[wrong].chunk(0)
            turned = values.values.take(pa.array(np.arange(len(values.values))[::-1]))
            turned = pa.LargeListArray.from_arrays(values.offsets, turned)
            columns = columns.set_column(columns.schema.get_field_index(wrong), wrong, turned)
        add(self, ids, others, rendering, columns)

    monkeypatch.setattr(message_cache.RowCache, "add", added)
    start(rows, store=store)
    monkeypatch.setattr(message_cache.RowCache, "add", add)
    found = start(rows, store=store)
    assert start.made == [25, 25]
    assert rows_of(found, start.tokenizer) == expected_of(rows, start.tokenizer)
    start(rows, store=store)
    assert start.made == [25, 25]


def test_rows_that_differ_from_nemo_rl_do_not_become_an_entry(
    start: Any, module: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(row: Any, *given: Any, **named: Any) -> Any:
        return sft_processor(row, *given, **named) | {"length": 0}

    monkeypatch.setitem(module.STOCK, "sft_processor", other)
    for store in ("memory", "disk"):
        assert start(chat_rows(), store=store).processor is other
    assert list(warm_cache.glob("*")) == list((warm_cache.parent / "store").glob("*")) == []


def test_a_bound_of_the_cache_counts_texts(start: Any, warm_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = start(chat_rows())
    bytes_of_ids = dataset.dataset.ids.values.nbytes + dataset.dataset.ids.starts.nbytes
    for path in warm_cache.glob("*"):
        path.unlink()
    with caplog.at_level(logging.INFO):
        start(chat_rows(), token_cache_bytes=bytes_of_ids + 1)
    assert f"gpuload: tokens are not cached: they would exceed token_cache_bytes={bytes_of_ids + 1}" in (
        message.replace(",", "") for message in caplog.messages
    )
    assert list(warm_cache.glob("*")) == []


def test_a_full_disk(start: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("gpuload.cache.column_file.ColumnWriter.close", full)
    expected = expected_of(chat_rows(), start.tokenizer)
    assert rows_of(start(chat_rows(), store="memory"), start.tokenizer) == expected
    with pytest.raises(StoreError, match="the disk is full"):
        start(chat_rows(), store="disk")
    assert list(warm_cache.glob("*")) == list((warm_cache.parent / "store").glob("*")) == []


def test_values_that_are_not_json_are_nemo_rls(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = chat_rows()
    rows[3] = {**rows[3], "messages": [{**CHATS[3][0], "at": date(2026, 1, 2)}, *CHATS[3][1:]]}
    for _ in range(2):
        assert rows_of(start(rows), start.tokenizer) == expected_of(rows, start.tokenizer)
    assert "a value has the type date, which JSON has not" in caplog.text
    assert start.made == [25]


def test_options_that_have_no_effect(
    start: Any, module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    start(chat_rows(), device="cpu", store="memory")
    assert (
        "gpuload: data.train.gpuload.device='cpu' has no effect: messages for SFT are tokenized on the CPU"
        in caplog.text
    )
    assert "gpuload.store" not in caplog.text
    caplog.clear()
    dataset = module.NemoPromptDataset(data_path="x", tokenizer={"name": qwen_folder}, gpuload={"store": "memory"})
    vars(dataset).update(dataset=StandIn("x").dataset, val_dataset=None, chosen=processor)
    StandIn.set_task_spec(dataset, {"processor": "default"})
    dataset.set_processor()
    assert "data.train.gpuload.store='memory' has no effect: prompts are in memory, with their texts" in caplog.text
