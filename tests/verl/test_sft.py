"""SFTDataset compared with verl's own class, row by row: keys, dtypes, values and errors."""

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiers import examples

pytest.importorskip("verl.utils.dataset")

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from processor_cases import QWEN_VL, qwen_vl
from sft_cases import (
    CONVERSATIONS,
    LONG,
    NEEDS_USER,
    PRINTS_ARGUMENTS,
    REMOVES_THINKING,
    SKIPS_SYSTEM,
    TOOLS,
    assert_equal,
    compare,
    conversation,
    raising_rows,
)
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

import gpuload
from gpuload.core.errors import DataError, OptionError
from gpuload.core.marks import LOSS
from gpuload.integrations.verl import SFTDataset, turns


@pytest.fixture
def with_template(qwen_folder: str) -> Callable[[str | None], Any]:
    def make(template: str | None) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
        tokenizer.chat_template = template or tokenizer.chat_template
        return tokenizer

    return make


@pytest.mark.parametrize("template", [None, NEEDS_USER, REMOVES_THINKING, PRINTS_ARGUMENTS, SKIPS_SYSTEM])
@pytest.mark.parametrize(("ignore", "repeats"), [(False, 20), (True, 1)])
def test_templates(write: Any, with_template: Any, template: str | None, ignore: bool, repeats: int) -> None:
    file = write({"messages": CONVERSATIONS * repeats})
    dataset = compare(file, with_template(template), {**LONG, "ignore_input_ids_mismatch": ignore})
    assert dataset.report is not None
    assert len(raising_rows(dataset)) < len(dataset)


def test_padding_and_truncation(write: Any, qwen: Any) -> None:
    file = write({"messages": CONVERSATIONS})
    for length in (1, 24, 33, 1024):
        for pad_mode in ("right", "no_padding"):
            config = {"pad_mode": pad_mode, "max_length": length, "ignore_input_ids_mismatch": True}
            dataset = SFTDataset(file, qwen, {**config, "gpuload": {"verify": "off"}})
            expected = MultiTurnSFTDataset([file], qwen, config)
            for truncation in ("error", "left", "right"):
                dataset.truncation = expected.truncation = truncation
                assert_equal(dataset, expected)


def test_row_over_the_limit(write: Any, qwen: Any) -> None:
    file = write({"messages": CONVERSATIONS[:2]})
    dataset = SFTDataset(file, qwen, {"max_length": 40, "ignore_input_ids_mismatch": True})
    with pytest.raises(ValueError, match=r"row 1 \(.*data.parquet row 1\) has \d+ tokens, more than max_length=40"):
        dataset[1]


@pytest.mark.parametrize("template", [None, NEEDS_USER])
@pytest.mark.parametrize("repeats", [1, 20])
def test_tools_of_each_row(write: Any, with_template: Any, template: str | None, repeats: int) -> None:
    choices = [TOOLS, TOOLS[:1], [], TOOLS[:1], None, TOOLS[1:]]
    conversations = [messages for messages in CONVERSATIONS if messages[0]["role"] != "assistant"]
    tools = [choices[number % len(choices)] for number in range(len(conversations) * repeats)]
    dataset = compare(write({"messages": conversations * repeats, "tools": tools}), with_template(template), LONG)
    assert any(tools[row] is None for row in raising_rows(dataset))
    assert len(raising_rows(dataset)) < len(dataset) / 2


def test_tools_as_json_text_raise_as_in_verl(write: Any, qwen: Any) -> None:
    dataset = compare(write({"messages": CONVERSATIONS[:3], "tools": ['[{"a": 1}]'] * 3}), qwen, LONG)
    assert raising_rows(dataset) == [0, 1, 2]


def test_tool_calls_and_their_results(write: Any, qwen: Any) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "gnu"}}}
    messages = [
        {"role": "user", "content": "What is a gnu?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "an antelope", "tool_calls": None},
        {"role": "tool", "content": "not Unix", "tool_calls": None},
        {"role": "assistant", "content": "An antelope.", "tool_calls": None},
    ]
    conversations = [messages, messages[:3], [messages[0], {**messages[1], "content": None}, *messages[2:3]]] * 8
    compare(write({"messages": conversations, "tools": [TOOLS] * len(conversations)}), qwen, LONG)
    compare(write({"messages": conversations}), qwen, {**LONG, "ignore_input_ids_mismatch": True})


@pytest.mark.parametrize("default", [None, True, False, "none"])
@pytest.mark.parametrize("column", [None, [True, False], [False, None], ["no", ""]])
def test_enable_thinking(write: Any, with_template: Any, default: Any, column: Any) -> None:
    conversations = CONVERSATIONS[:2] * 20
    columns: dict[str, Any] = {"messages": conversations}
    if column is not None:
        columns["enable_thinking"] = [column[number % 2] for number in range(len(conversations))]
    config = {**LONG, "enable_thinking_default": default, "apply_chat_template_kwargs": {"style": "plain"}}
    dataset = compare(write(columns), with_template(PRINTS_ARGUMENTS), config)
    assert dataset.report is not None


@pytest.mark.parametrize(
    ("kwargs", "by_column"),
    [
        ({"style": "a", "enable_thinking": False}, True),
        ({"chat_template": SKIPS_SYSTEM}, True),
        ({"style": ["nested"]}, False),
        ({"max_length": 12, "truncation": True}, False),
    ],
)
def test_arguments_of_the_template(write: Any, with_template: Any, kwargs: Any, by_column: bool) -> None:
    config = {**LONG, "apply_chat_template_kwargs": kwargs, "ignore_input_ids_mismatch": True}
    dataset = compare(write({"messages": CONVERSATIONS}), with_template(PRINTS_ARGUMENTS), config)
    assert (dataset.report is not None) == by_column


def test_contents_that_are_not_text(write: Any, with_template: Any) -> None:
    conversations = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "a"}, None],
        [],
        None,
        [{"role": None, "content": "a"}],
        *CONVERSATIONS[:2],
    ]
    for template in (None, SKIPS_SYSTEM):
        dataset = compare(write({"messages": conversations}), with_template(template), LONG)
        assert dataset.report is not None
        assert len(raising_rows(dataset)) < len(dataset)
    parts = [[{"role": "user", "content": [{"type": "text", "text": "in parts"}]}, {"role": "user", "content": []}]]
    compare(write({"messages": parts}), with_template(NEEDS_USER), LONG)


def test_invalid_utf8(write: Any, qwen: Any) -> None:
    good, bad = b"fine", b"\xff\xfe"
    content = pa.array([good, bad, good], pa.binary()).view(pa.string())
    role = pa.array(["user", "user", "assistant"])
    messages = pa.StructArray.from_arrays([role, content], names=["role", "content"])
    column = pa.ListArray.from_arrays([0, 1, 3], messages)
    dataset = SFTDataset(write({"messages": column}), qwen, LONG)  # verl's class raises for such a file
    assert raising_rows(dataset) == [1]
    fine = MultiTurnSFTDataset([write({"messages": column.slice(0, 1)}, "fine.parquet")], qwen, LONG)
    assert torch.equal(dataset[0]["input_ids"], fine[0]["input_ids"])


@pytest.mark.parametrize("kind", ["large", "dictionary", "reversed"])
def test_other_encodings_of_the_same_messages(write: Any, qwen: Any, kind: str) -> None:
    text = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else pa.large_string()
    fields = [("role", text), ("content", pa.large_string())]
    struct = pa.struct(fields[::-1] if kind == "reversed" else fields)
    column = pa.array(CONVERSATIONS, pa.large_list(struct) if kind == "large" else pa.list_(struct))
    assert compare(write({"messages": column}), qwen, LONG).report is not None


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [-1, 0, 7, 99])
def test_samples(write: Any, qwen: Any, shuffle: bool, samples: int) -> None:
    files = [
        write({"messages": CONVERSATIONS}, "a.parquet"),
        write({"messages": CONVERSATIONS[::-1], "other": range(11)}, "b.parquet"),
    ]
    config = {**LONG, "shuffle": shuffle, "seed": 3, "ignore_input_ids_mismatch": True}
    dataset = compare(files, qwen, config, max_samples=samples)
    assert len(dataset) == (7 if samples == 7 else 22)
    for wrong in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[wrong]
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])


def test_files_whose_columns_differ(write: Any, qwen: Any) -> None:
    conversations = CONVERSATIONS[:5]
    files = [
        write({"messages": conversations, "tools": [TOOLS[:1]] * 5, "enable_thinking": [True] * 5}, "a.parquet"),
        write({"messages": conversations, "enable_thinking": [False] * 5}, "b.parquet"),
        write(
            {"tools": [TOOLS] * 5, "messages": [[{**m, "name": "x"} for m in messages] for messages in conversations]},
            "c.parquet",
        ),
    ]
    dataset = compare(files, qwen, LONG)
    assert {5, 6, 7, 8, 9} <= set(raising_rows(dataset))
    assert not set(raising_rows(dataset)) & {0, 1}


def test_fallback_to_verl(write: Any, qwen: Any, with_template: Any) -> None:
    image = write({"messages": CONVERSATIONS, "images": [None] * len(CONVERSATIONS)}, "image.parquet")
    assert compare(image, qwen, LONG).report is None
    text = write({"messages": ["not messages"]}, "text.parquet")
    assert compare(text, qwen, LONG).report is None
    with_types = with_template(None)
    with_types.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert compare(write({"messages": [*CONVERSATIONS, CONVERSATIONS[5]]}), with_types, LONG).report is None


def test_text_with_a_processor(write: Any, with_template: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Positions have four rows. verl's method makes a row with a token that stands for an image, or raises."""
    processor = qwen_vl(with_template(QWEN_VL))
    seen = conversation("<|image_pad|>", "I see nothing")
    tools = [TOOLS[:1] if number % 2 else None for number in range(20)]
    file = write({"messages": [*CONVERSATIONS, seen]})
    with caplog.at_level(logging.WARNING):
        for config in (LONG, {"max_length": 60, "truncation": "left"}, {"max_length": 60, "truncation": "right"}):
            dataset = compare(file, processor.tokenizer, config, processor=processor)
            assert dataset.report is not None
            own = "1 row tokenized by verl's method" in dataset.report  # transformers 5.23 raises an error
            assert own != (len(CONVERSATIONS) in raising_rows(dataset))
        assert dataset[0]["position_ids"].shape == (4, 60)
        with_tools = write({"messages": [CONVERSATIONS[0]] * 20, "tools": tools}, "tools.parquet")
        assert compare(with_tools, processor.tokenizer, LONG, processor=processor).report is not None
    assert "Qwen2VLProcessor is a processor; 12 rows prepared by both are equal: used" in caplog.text


@pytest.mark.parametrize("template", [None, NEEDS_USER, REMOVES_THINKING])
def test_templates_with_a_processor(write: Any, with_template: Any, template: str | None) -> None:
    """Some have no result for messages in parts, so all rows raise an error."""
    processor = qwen_vl(with_template(template or QWEN_VL))
    processor.chat_template = template or QWEN_VL.replace("content['text']", "content['text'] | trim | upper")
    compare(write({"messages": CONVERSATIONS}), processor.tokenizer, LONG, processor=processor)


def test_processors_that_verl_calls_itself(write: Any, with_template: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = with_template(None)
    processor = qwen_vl(tokenizer)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    file = write({"messages": CONVERSATIONS})
    assert compare(file, tokenizer, LONG, processor=processor).report is None
    assert "the processor also returns token_type_ids" in caplog.text


def test_missing_column_and_invalid_settings(write: Any, qwen: Any) -> None:
    file = write({"messages": CONVERSATIONS})
    with pytest.raises(DataError, match="did you mean prompt_key='messages'"):
        SFTDataset(file, qwen, {"messages_key": "chat"})
    with pytest.raises(OptionError, match="verfy.*did you mean verify"):
        SFTDataset(file, qwen, {"gpuload": {"verfy": "off"}})
    with pytest.raises(OptionError, match="expected one of 'sample'"):
        SFTDataset(file, qwen, {"gpuload": {"verify": True}})


def test_access_does_not_tokenize(write: Any, with_template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(None)
    conversations = [*CONVERSATIONS, conversation("x", "y")]
    conversations[-1][1]["content"] = None  # type: ignore[assignment]
    config = {**LONG, "ignore_input_ids_mismatch": True}
    dataset = SFTDataset(write({"messages": conversations}), tokenizer, config)
    rows = [row for row in range(len(dataset)) if row not in raising_rows(dataset)]
    assert len(rows) >= len(CONVERSATIONS)

    def reject(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenized at access")

    monkeypatch.setattr(type(tokenizer), "__call__", reject)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", reject)
    for row in rows:
        assert len(dataset[row]["input_ids"])


def test_the_rule_of_verl_is_not_that_of_load_chats(write: Any, qwen: Any) -> None:
    """With Qwen2.5, `load_chats` counts the line break after an assistant's header as part of the answer."""
    conversations = [CONVERSATIONS[0], CONVERSATIONS[1], CONVERSATIONS[2]]
    file = write({"messages": conversations})
    chats = gpuload.load_chats(file, qwen)
    dataset = compare(file, qwen, {**LONG, "ignore_input_ids_mismatch": True})
    for row, messages in enumerate(conversations):
        mask = dataset[row]["loss_mask"].bool().tolist()
        more = [label != -100 for label in chats[row]["labels"]]
        assert dataset[row]["input_ids"].tolist() == chats[row]["input_ids"]
        assert sum(more) == sum(mask) + sum(message["role"] == "assistant" for message in messages)
        assert all(more[at] for at, learned in enumerate(mask) if learned)


@pytest.mark.parametrize("verify", ["sample", "full", "off"])
def test_wrong_mask_falls_back_to_verl(
    write: Any, qwen: Any, verify: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    file = write({"messages": CONVERSATIONS * 10})
    original = turns.ConversationTokenizer.tokenize

    def wrong(*args: Any, **kwargs: Any) -> Any:
        tokenized = original(*args, **kwargs)
        tokenized.ids.values[:] ^= LOSS
        return tokenized

    monkeypatch.setattr(turns.ConversationTokenizer, "tokenize", wrong)
    config = {**LONG, "ignore_input_ids_mismatch": True, "gpuload": {"verify": verify}}
    dataset = SFTDataset(file, qwen, config)
    if verify == "off":
        assert dataset.report is not None
        return
    assert dataset.report is None
    assert "differs from the result of verl's method" in caplog.text
    assert_equal(dataset, MultiTurnSFTDataset([file], qwen, config))


def test_created_and_loaded_as_by_the_trainer(write: Any, qwen: Any) -> None:
    file = write({"messages": CONVERSATIONS * 3})
    config = OmegaConf.create(
        {
            "custom_cls": {"path": "pkg://gpuload.integrations.verl", "name": "SFTDataset"},
            "pad_mode": "no_padding",
            "ignore_input_ids_mismatch": True,
        }
    )
    dataset = create_sft_dataset(OmegaConf.create([file]), config, qwen, None, max_samples=-1)
    assert type(dataset) is SFTDataset
    config.custom_cls = {"path": None, "name": None}
    expected = create_sft_dataset([file], config, qwen, None, max_samples=-1)
    batches = [
        list(DataLoader(source, 4, collate_fn=SFTTensorCollator("no_padding"), num_workers=workers))
        for source, workers in ((expected, 0), (dataset, 0), (dataset, 2), (pickle.loads(pickle.dumps(dataset)), 0))
    ]
    for others in batches[1:]:
        assert len(others) == len(batches[0])
        for one, other in zip(batches[0], others, strict=True):
            assert set(one) == set(other)
            for key in one:
                assert all(map(torch.equal, one[key].unbind(), other[key].unbind())), key


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text(max_size=30)),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, NEEDS_USER, REMOVES_THINKING]),
)
@examples(10)
def test_random_texts(tmp_path_factory: Any, qwen_folder: str, conversations: Any, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    file = str(tmp_path_factory.mktemp("random") / "conversations.parquet")
    column = [[{"role": role, "content": text} for role, text in messages] for messages in conversations]
    pq.write_table(pa.table({"messages": column}), file)
    compare(file, tokenizer, {**LONG, "ignore_input_ids_mismatch": True, "gpuload": {"verify": "off"}})
