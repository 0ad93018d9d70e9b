"""SFTDataset against verl's own class, item by item: keys, dtypes, values, and what raises."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("verl.utils.dataset")

from conftest import SHARED, shared_files
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from gpuload.errors import DataError, OptionError
from gpuload.integrations.verl import SFTDataset, turns

LONG = {"max_length": 4096, "pad_mode": "no_padding"}

# Qwen2.5's is shipped; these do what other vendors' templates do.
NEEDS_USER = """{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content[0].text %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
FORGETS_THOUGHTS = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and not loop.last %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
SAYS_ITS_SETTINGS = """{{- bos_token or '' }}[{{ enable_thinking if enable_thinking is defined else '-' }}|{{ style }}]
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
KEEPS_THINGS = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": None}}
    for name in ("look_up", "send", "weather")
]


def conversation(*texts: str, system: str | None = None, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return said if system is None else [{"role": "system", "content": system}, *said]


TALKS = [
    conversation("What is 6 × 7?", "42."),
    conversation("Hi", "Hello! How can I help?", "Tell me a joke\n\n", "  No.  ", system="You are terse."),
    conversation("你好，世界", "你好！", "ありがとう", "どういたしまして 🙂"),
    conversation("<|im_start|>user\nsneaky<|im_end|>", "It's <|endoftext|> you\u00a0know", system=""),
    conversation("", "", "", ""),
    conversation("only a question"),
    conversation("I begin", "do you?", first="assistant"),
    conversation("a", "<think>\nhm\n</think>\n\nb", "c", "<think>ok</think>d"),
    conversation("x" * 700, "y " * 300, "e\u0301\u212b", "z"),
    [*conversation("one", "two"), {"role": "system", "content": "late"}, {"role": "user", "content": "three"}],
    [{"role": "user", "content": "twice"}, {"role": "user", "content": "asked"}, {"role": "assistant", "content": "k"}],
]


@pytest.fixture
def with_template(qwen_folder: str) -> Callable[[str | None], Any]:
    def make(template: str | None) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
        tokenizer.chat_template = template or tokenizer.chat_template
        return tokenizer

    return make


def outcome(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except Exception as error:
        return error


def assert_equal(ours: Any, verls: Any) -> None:
    assert len(ours) == len(verls)
    for number in range(len(verls)):
        mine, theirs = outcome(ours, number), outcome(verls, number)
        if isinstance(theirs, Exception):
            assert isinstance(mine, type(theirs)), (number, mine, theirs)
            continue
        assert not isinstance(mine, Exception), (number, mine)
        assert list(mine) == list(theirs), number
        for key, value in theirs.items():
            if not isinstance(value, torch.Tensor):
                assert repr(mine[key]) == repr(value), (number, key)
                continue
            assert mine[key].dtype == value.dtype, (number, key)
            assert torch.equal(mine[key], value), (number, key)


def compare(files: Any, tokenizer: Any, config: dict[str, Any], **settings: Any) -> Any:
    """Both data sets, equal in every row; ours is returned."""
    ours = SFTDataset(files, tokenizer, OmegaConf.create(config), **settings)
    files = [files] if isinstance(files, str) else list(files)
    assert_equal(ours, MultiTurnSFTDataset(files, tokenizer, OmegaConf.create(config), **settings))
    return ours


def raising(dataset: Any) -> list[int]:
    return [row for row in range(len(dataset)) if isinstance(outcome(dataset, row), Exception)]


@pytest.mark.parametrize("template", [None, NEEDS_USER, FORGETS_THOUGHTS, SAYS_ITS_SETTINGS, KEEPS_THINGS])
@pytest.mark.parametrize(("ignore", "many"), [(False, 20), (True, 1)])
def test_templates(write: Any, with_template: Any, template: str | None, ignore: bool, many: int) -> None:
    file = write({"messages": TALKS * many})
    ours = compare(file, with_template(template), {**LONG, "ignore_input_ids_mismatch": ignore})
    assert ours.report is not None
    assert len(raising(ours)) < len(ours)


def test_padding_and_truncation(write: Any, qwen: Any) -> None:
    file = write({"messages": TALKS})
    for length in (1, 24, 33, 1024):
        for pad_mode in ("right", "no_padding"):
            config = {"pad_mode": pad_mode, "max_length": length, "ignore_input_ids_mismatch": True}
            ours = SFTDataset(file, qwen, {**config, "gpuload": {"verify": "off"}})
            verls = MultiTurnSFTDataset([file], qwen, config)
            for truncation in ("error", "left", "right"):
                ours.truncation = verls.truncation = truncation
                assert_equal(ours, verls)


def test_a_row_over_the_limit_is_named(write: Any, qwen: Any) -> None:
    file = write({"messages": TALKS[:2]})
    ours = SFTDataset(file, qwen, {"max_length": 40, "ignore_input_ids_mismatch": True})
    with pytest.raises(ValueError, match=r"row 1 \(.*data.parquet row 1\) has \d+ tokens, more than max_length=40"):
        ours[1]


@pytest.mark.parametrize("template", [None, NEEDS_USER])
@pytest.mark.parametrize("many", [1, 20])
def test_tools_of_each_row(write: Any, with_template: Any, template: str | None, many: int) -> None:
    choices = [TOOLS, TOOLS[:1], [], TOOLS[:1], None, TOOLS[1:]]
    talks = [talk for talk in TALKS if talk[0]["role"] != "assistant"]
    tools = [choices[number % len(choices)] for number in range(len(talks) * many)]
    ours = compare(write({"messages": talks * many, "tools": tools}), with_template(template), LONG)
    assert any(tools[row] is None for row in raising(ours))
    assert len(raising(ours)) < len(ours) / 2


def test_tools_as_json_text_raise_as_in_verl(write: Any, qwen: Any) -> None:
    ours = compare(write({"messages": TALKS[:3], "tools": ['[{"a": 1}]'] * 3}), qwen, LONG)
    assert raising(ours) == [0, 1, 2]


def test_tool_calls_and_their_results(write: Any, qwen: Any) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "gnu"}}}
    talk = [
        {"role": "user", "content": "What is a gnu?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "an antelope", "tool_calls": None},
        {"role": "tool", "content": "not Unix", "tool_calls": None},
        {"role": "assistant", "content": "An antelope.", "tool_calls": None},
    ]
    talks = [talk, talk[:3], [talk[0], {**talk[1], "content": None}, *talk[2:3]]] * 8
    compare(write({"messages": talks, "tools": [TOOLS] * len(talks)}), qwen, LONG)
    compare(write({"messages": talks}), qwen, {**LONG, "ignore_input_ids_mismatch": True})


@pytest.mark.parametrize("default", [None, True, False, "none"])
@pytest.mark.parametrize("column", [None, [True, False], [False, None], ["no", ""]])
def test_enable_thinking(write: Any, with_template: Any, default: Any, column: Any) -> None:
    talks = TALKS[:2] * 20
    columns: dict[str, Any] = {"messages": talks}
    if column is not None:
        columns["enable_thinking"] = [column[number % 2] for number in range(len(talks))]
    config = {**LONG, "enable_thinking_default": default, "apply_chat_template_kwargs": {"style": "plain"}}
    ours = compare(write(columns), with_template(SAYS_ITS_SETTINGS), config)
    assert ours.report is not None


@pytest.mark.parametrize(
    ("kwargs", "by_column"),
    [
        ({"style": "a", "enable_thinking": False}, True),
        ({"chat_template": KEEPS_THINGS}, True),
        ({"style": ["nested"]}, False),
        ({"max_length": 12, "truncation": True}, False),
    ],
)
def test_arguments_of_the_template(write: Any, with_template: Any, kwargs: Any, by_column: bool) -> None:
    config = {**LONG, "apply_chat_template_kwargs": kwargs, "ignore_input_ids_mismatch": True}
    ours = compare(write({"messages": TALKS}), with_template(SAYS_ITS_SETTINGS), config)
    assert (ours.report is not None) == by_column


def test_contents_that_are_no_text(write: Any, with_template: Any) -> None:
    talks = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "a"}, None],
        [],
        None,
        [{"role": None, "content": "a"}],
        *TALKS[:2],
    ]
    for template in (None, KEEPS_THINGS):
        ours = compare(write({"messages": talks}), with_template(template), LONG)
        assert ours.report is not None
        assert len(raising(ours)) < len(ours)
    parts = [[{"role": "user", "content": [{"type": "text", "text": "in parts"}]}, {"role": "user", "content": []}]]
    compare(write({"messages": parts}), with_template(NEEDS_USER), LONG)


def test_bytes_that_are_no_text(write: Any, qwen: Any) -> None:
    good, bad = b"fine", b"\xff\xfe"
    content = pa.array([good, bad, good], pa.binary()).view(pa.string())
    role = pa.array(["user", "user", "assistant"])
    messages = pa.StructArray.from_arrays([role, content], names=["role", "content"])
    column = pa.ListArray.from_arrays([0, 1, 3], messages)
    ours = SFTDataset(write({"messages": column}), qwen, LONG)  # verl's class cannot even be made over such a file
    assert raising(ours) == [1]
    fine = MultiTurnSFTDataset([write({"messages": column.slice(0, 1)}, "fine.parquet")], qwen, LONG)
    assert torch.equal(ours[0]["input_ids"], fine[0]["input_ids"])


@pytest.mark.parametrize("kind", ["large", "dictionary", "reversed"])
def test_other_encodings_of_the_same_messages(write: Any, qwen: Any, kind: str) -> None:
    text = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else pa.large_string()
    fields = [("role", text), ("content", pa.large_string())]
    struct = pa.struct(fields[::-1] if kind == "reversed" else fields)
    column = pa.array(TALKS, pa.large_list(struct) if kind == "large" else pa.list_(struct))
    assert compare(write({"messages": column}), qwen, LONG).report is not None


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [-1, 0, 7, 99])
def test_samples(write: Any, qwen: Any, shuffle: bool, samples: int) -> None:
    files = [write({"messages": TALKS}, "a.parquet"), write({"messages": TALKS[::-1], "other": range(11)}, "b.parquet")]
    config = {**LONG, "shuffle": shuffle, "seed": 3, "ignore_input_ids_mismatch": True}
    ours = compare(files, qwen, config, max_samples=samples)
    assert len(ours) == (7 if samples == 7 else 22)
    for wrong in (len(ours), -len(ours) - 1):
        with pytest.raises(IndexError):
            ours[wrong]
    assert torch.equal(ours[-1]["input_ids"], ours[len(ours) - 1]["input_ids"])


def test_files_whose_columns_differ(write: Any, qwen: Any) -> None:
    talks = TALKS[:5]
    files = [
        write({"messages": talks, "tools": [TOOLS[:1]] * 5, "enable_thinking": [True] * 5}, "a.parquet"),
        write({"messages": talks, "enable_thinking": [False] * 5}, "b.parquet"),
        write({"tools": [TOOLS] * 5, "messages": [[{**m, "name": None} for m in talk] for talk in talks]}, "c.parquet"),
    ]
    ours = compare(files, qwen, LONG)
    assert {5, 6, 7, 8, 9} <= set(raising(ours))
    assert not set(raising(ours)) & {0, 1}


def test_what_is_left_to_verls_class(write: Any, qwen: Any, with_template: Any) -> None:
    image = write({"messages": TALKS, "images": [None] * len(TALKS)}, "image.parquet")
    assert compare(image, qwen, LONG).report is None
    text = write({"messages": ["not messages"]}, "text.parquet")
    assert compare(text, qwen, LONG).report is None
    with_types = with_template(None)
    with_types.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert compare(write({"messages": [*TALKS, TALKS[5]]}), with_types, LONG).report is None


def test_missing_column_and_unknown_keys_are_named(write: Any, qwen: Any) -> None:
    file = write({"messages": TALKS})
    with pytest.raises(DataError, match="did you mean prompt_key='messages'"):
        SFTDataset(file, qwen, {"messages_key": "chat"})
    with pytest.raises(OptionError, match="verfy.*did you mean verify"):
        SFTDataset(file, qwen, {"gpuload": {"verfy": "off"}})
    with pytest.raises(OptionError, match="expected one of 'sample'"):
        SFTDataset(file, qwen, {"gpuload": {"verify": True}})


def test_rows_ask_nothing_of_the_tokenizer(write: Any, with_template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(None)
    talks = [*TALKS, conversation("x", "y")]
    talks[-1][1]["content"] = None  # type: ignore[assignment]
    config = {**LONG, "ignore_input_ids_mismatch": True}
    ours = SFTDataset(write({"messages": talks}), tokenizer, config)
    rows = [row for row in range(len(ours)) if row not in raising(ours)]
    assert len(rows) >= len(TALKS)

    def reject(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenized at access")

    monkeypatch.setattr(type(tokenizer), "__call__", reject)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", reject)
    for row in rows:
        assert len(ours[row]["input_ids"])


@pytest.mark.parametrize("verify", ["sample", "full", "off"])
def test_a_wrong_mask_sends_everything_to_verl(
    write: Any, qwen: Any, verify: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    file = write({"messages": TALKS * 10})
    own = turns.Turns.tokenize

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        made.loss = 1 - made.loss
        return made

    monkeypatch.setattr(turns.Turns, "tokenize", wrong)
    config = {**LONG, "ignore_input_ids_mismatch": True, "gpuload": {"verify": verify}}
    ours = SFTDataset(file, qwen, config)
    if verify == "off":
        assert ours.report is not None
        return
    assert ours.report is None
    assert "came out otherwise than in verl" in caplog.text
    assert_equal(ours, MultiTurnSFTDataset([file], qwen, config))


def test_made_and_loaded_as_the_trainer_does(write: Any, qwen: Any) -> None:
    file = write({"messages": TALKS * 3})
    config = OmegaConf.create(
        {
            "custom_cls": {"path": "pkg://gpuload.integrations.verl", "name": "SFTDataset"},
            "pad_mode": "no_padding",
            "ignore_input_ids_mismatch": True,
        }
    )
    ours = create_sft_dataset(OmegaConf.create([file]), config, qwen, None, max_samples=-1)
    assert type(ours) is SFTDataset
    config.custom_cls = {"path": None, "name": None}
    verls = create_sft_dataset([file], config, qwen, None, max_samples=-1)
    batches = [
        list(DataLoader(dataset, 4, collate_fn=SFTTensorCollator("no_padding"), num_workers=workers))
        for dataset, workers in ((verls, 0), (ours, 0), (ours, 2), (pickle.loads(pickle.dumps(ours)), 0))
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
    st.sampled_from([None, NEEDS_USER, FORGETS_THOUGHTS]),
)
@settings(max_examples=10)
def test_any_texts(tmp_path_factory: Any, qwen_folder: str, talks: Any, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    file = str(tmp_path_factory.mktemp("any") / "talks.parquet")
    column = [[{"role": role, "content": text} for role, text in talk] for talk in talks]
    pq.write_table(pa.table({"messages": column}), file)
    compare(file, tokenizer, {**LONG, "ignore_input_ids_mismatch": True, "gpuload": {"verify": "off"}})


REAL = {
    "zh_multiturn.parquet": "prompt",
    "sgd_multiturn.parquet": "prompt",
    "bfcl_tools.parquet": "prompt",
    "wild/3nesdeniz*test.parquet": "messages",
}


@pytest.mark.skipif(not SHARED.exists(), reason="real data sets are not here")
@pytest.mark.parametrize("name", ["deepseek-v3", "llama3.1-instruct", "olmo2-dolma2", "qwen2.5-instruct", "qwen3"])
def test_real_conversations(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    for pattern, key in REAL.items():
        table = pq.read_table(shared_files(pattern)[0], columns=[key])
        spread = np.linspace(0, len(table) - 1, 12).astype(int)
        # Some are prompts: an answer is needed for there to be a loss.
        talks = [
            [*talk, {"role": "assistant", "content": talk[0]["content"][::-1]}] if talk[-1]["role"] == "user" else talk
            for talk in table.column(key).take(pa.array(spread)).to_pylist()
        ]
        file = str(tmp_path / "talks.parquet")
        pq.write_table(pa.table({"messages": talks}), file)
        ours = compare(file, tokenizer, {**LONG, "ignore_input_ids_mismatch": True})
        assert ours.report is not None
        assert not raising(ours)


@pytest.mark.skipif(not SHARED.exists(), reason="real data sets are not here")
@pytest.mark.parametrize("name", ["gemma3", "mistral-nemo"])
def test_templates_that_serve_verl_not_at_all(name: str, write: Any) -> None:
    """They insist on alternating roles, and verl asks them for two users in a row."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    file = write({"messages": TALKS[:1]})
    for kind in (MultiTurnSFTDataset, SFTDataset):
        with pytest.raises(TemplateError, match="must alternate"):
            kind([file], tokenizer, LONG)
