"""The integration with NeMo-RL without NeMo-RL: rows, and which of NeMo-RL's names it uses."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tiers import examples

from gpuload.core.errors import DataError, OptionError
from gpuload.integrations.comparison import comparable
from gpuload.integrations.known_code import digest
from gpuload.integrations.nemo_rl import conversations
from gpuload.integrations.nemo_rl.conversations import ConversationProcessor, MessageSettings, tokenized_conversations
from gpuload.integrations.nemo_rl.rows import identity, tokenized

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
    monkeypatch.setattr(module, "_SAMPLE", 1)  # a sample of all rows is taken, whatever the usual one has

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
    made = tokenized_conversations(chats, "task", tokenizer, {}, MessageSettings(**named), None)
    process = ConversationProcessor(identity(tokenizer), MessageSettings(**named))
    for row, chat in enumerate(chats):
        for limit in (7, 4096):
            expected = sft_processor({"messages": chat}, None, tokenizer, limit, row, **named)
            assert comparable(process(made[row], None, tokenizer, limit, row, **named)) == comparable(expected)


def test_conversations_are_loaded_in_parts(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [[{"role": "user", "content": f"{row} {k}"} for k in range(row % 4 + 1)] for row in range(30)]
    whole = tokenized_conversations(chats, "task", qwen, {}, MessageSettings(), None)
    monkeypatch.setattr(conversations, "_AT_ONCE", 7)
    parts = tokenized_conversations(chats, "task", qwen, {}, MessageSettings(), None)
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
    assert np.setdiff1d(np.arange(26), dataset.dataset.tokenized).tolist() == [
        numbers.index(row) for row in (3, 25, 26)
    ]
    for place, row in enumerate(numbers[:-1]):
        expected = sft_processor(rows[row], None, tokenizer, 99, place)
        assert comparable(dataset.processor(dataset.dataset[place], None, tokenizer, 99, place)) == comparable(expected)
    with pytest.raises(Exception, match="no"):
        dataset.processor(dataset.dataset[25], None, tokenizer, 99, 25)
    assert loaded(rows[-1:]).processor is sft_processor
    assert "falls back to NeMo-RL for task: no" in caplog.messages[-1]
