"""load_pairs: rows and batches of every format, compared with TRL's own preparation and collators."""

from __future__ import annotations

import copy
import itertools
import json
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
from tiers import SHARED, core, examples, shared

import gpuload
from gpuload.core.errors import DataError, MismatchError, OptionError

trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
import trl_cases  # noqa: E402
from export_cases import one_thread, small_model  # noqa: E402
from tokenizer_cases import needs_sanitizing, small_tokenizer  # noqa: E402

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
OBJECTIVES = ("dpo", "rm", "kto")
IDS = {
    "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "rm": ("chosen_ids", "rejected_ids"),
    "kto": ("prompt_ids", "completion_ids", "KL_completion_ids", "label"),
}

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


TURNS = [
    ([user("Hi")], [assistant("Hello!")], [assistant("Go away.")]),
    ([{"role": "system", "content": "Be brief."}, user("é 你")], [assistant("👋🏽")], [assistant("")]),
    ([user("Hi"), assistant("Yes?"), user("And?")], [assistant("x")], [assistant("x y")]),
    ([user(" a ")], [assistant(" b\n")], [assistant("\tb"), user("c"), assistant("d")]),
    ([user("<|im_end|>")], [assistant("<|im_start|>assistant\n")], [assistant("<|im_start|>")]),
    ([user("same")], [assistant("same")], [assistant("same")]),
]
EXPLICIT = [dict(zip(("prompt", "chosen", "rejected"), turns, strict=True)) for turns in TURNS]
IMPLICIT = [{"chosen": prompt + chosen, "rejected": prompt + rejected} for prompt, chosen, rejected in TURNS]
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    {"prompt": "", "chosen": "", "rejected": "é"},
    {"prompt": "The su", "chosen": "n<|im_end|>", "rejected": "n sets"},
]
IMPLICIT_TEXTS = [
    {"chosen": "Human: Hi Assistant: Hello", "rejected": "Human: Hi Assistant: Go"},
    {"chosen": "one two", "rejected": "one two three"},
    {"chosen": "one", "rejected": "one"},
    {"chosen": " x", "rejected": " y"},
]


def trainer_of(objective: str) -> tuple[Any, Any]:
    """TRL's trainer for an objective, and its configuration."""
    if objective == "dpo":
        return trl.DPOTrainer, trl.DPOConfig
    if objective == "rm":
        return trl.RewardTrainer, trl.RewardConfig
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer, KTOConfig


def prepared(rows: list[Row], tokenizer: Any, objective: str, **settings: Any) -> list[Row]:
    """The rows of TRL's own preparation."""
    made = trl_cases.prepared(*trainer_of(objective), trl_cases.unhashed(rows), tokenizer, **settings)
    return [{name: row[name] for name in IDS[objective]} for row in made]


def rows_of(dataset: gpuload.PairDataset) -> list[Row]:
    return [{name: row[name] for name in IDS[dataset.objective]} for row in (dataset[k] for k in range(len(dataset)))]


def load(rows: list[Row], tokenizer: Any, objective: Any, **options: Any) -> gpuload.PairDataset:
    table = pa.Table.from_pylist(rows)
    return gpuload.load_pairs(table, tokenizer, objective=objective, **{"verify": "full", "strict": True} | options)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "rows",
    [EXPLICIT, IMPLICIT, TEXTS, IMPLICIT_TEXTS],
    ids=["explicit", "implicit", "texts", "implicit texts"],
)
def test_rows_are_those_of_trls_preparation(qwen: Any, rows: list[Row], objective: Any) -> None:
    found = load(rows, qwen, objective)
    assert rows_of(found) == prepared(rows, qwen, objective)
    assert found.report.check.rows == len(rows)
    by_prompt = gpuload.load_pairs(
        pa.Table.from_pylist(rows), qwen, objective=objective,
        apply_chat_template_kwargs={"tokenizer_kwargs": {"verbose": False}},
    )  # fmt: skip
    assert by_prompt.report.engine.startswith("cpu: rendered and encoded by") or rows in (TEXTS, IMPLICIT_TEXTS)
    assert rows_of(by_prompt) == rows_of(found)


def write_json(rows: list[Row], directory: Path) -> str:
    path = directory / "rows.json"
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("share", ["few", "all"])
@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_answers_keep_fields_that_their_prompts_lack(
    qwen: Any, tmp_path: Path, form: str, share: str, objective: Any
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{% for k in m %}[{{ k }}{{ m[k] if m[k] is string else m[k] | tojson }}]"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    rows = []
    for k in range(40):
        good = assistant(f"good {k}")
        if share == "all" or k % 16 == 5:
            call = {"function": {"name": "f", "arguments": {"city": f"c {k}"}}}
            good |= {"reasoning_content": f"because {k}", "tool_calls": [call]}
        rows.append({"prompt": [user(f"q {k}")], "chosen": [good], "rejected": [assistant(f"bad {k}")]})
    if form == "jsonl":
        source: Any = str(tmp_path / "rows.jsonl")
        Path(source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        source = pa.Table.from_pylist(rows)
        rows = source.to_pylist()  # all messages have all keys, which transformers 4 shows to the template
    found = gpuload.load_pairs(source, qwen, objective=objective, chat_template=template, verify="off")
    names = {"dpo": ("chosen_ids", "rejected_ids"), "rm": ("chosen_ids", "rejected_ids")}.get(objective, ())
    expected = {
        name: [
            qwen.apply_chat_template(row["prompt"] + row[name], return_dict=False, chat_template=template)
            for row in rows
        ]
        for name in ("chosen", "rejected")
    }
    made = rows_of(found)
    for name in names:
        part = name.removesuffix("_ids")
        assert [row.get("prompt_ids", []) + row[name] for row in made] == expected[part]
    if objective == "kto":
        whole = [row["prompt_ids"] + row["completion_ids"] for row in made]
        assert sorted(whole) == sorted(expected["chosen"] + expected["rejected"])


@needs_sanitizing
def test_sanitized_answers_keep_their_fields(qwen: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{% for k in m %}[{{ k }}{{ m[k] }}]{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    good = assistant("a") | {"reasoning_content": "why<|im_end|>"}
    rows = [{"prompt": [user(f"q<|im_end|> {k}")], "chosen": [good], "rejected": [assistant("b")]} for k in range(5)]
    kwargs = {"sanitize_control_tokens": True}
    found = load(rows, qwen, "dpo", chat_template=template, apply_chat_template_kwargs=kwargs)
    whole = [qwen.apply_chat_template(row["prompt"] + row["chosen"], chat_template=template, **kwargs) for row in rows]
    assert [row["prompt_ids"] + row["chosen_ids"] for row in rows_of(found)] == [each["input_ids"] for each in whole]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("other", [EXPLICIT[0], {**EXPLICIT[1], "prompt": "x"}], ids=["messages", "answers"])
def test_one_pair_of_another_kind_among_texts(qwen: Any, tmp_path: Path, objective: Any, other: Row) -> None:
    """As TRL decides it for each row."""
    rows = [*({"prompt": f"q {k} ", "chosen": f"a {k}", "rejected": f"b {k}"} for k in range(20)), {}]
    rows[20], rows[7] = rows[7], other
    found = gpuload.load_pairs(write_json(rows, tmp_path), qwen, objective=objective, verify="full", strict=True)
    assert found.report.check.mismatches == []
    path = write_json(rows[:7] + rows[8:], tmp_path)
    texts = gpuload.load_pairs(path, qwen, objective=objective)
    alone = gpuload.load_pairs(write_json([other], tmp_path), qwen, objective=objective)
    expected, one = rows_of(texts), rows_of(alone)
    if objective == "kto":
        names = ("prompt_ids", "completion_ids")  # KL_completion_ids are those of other rows
        expected = [
            {name: row[name] for name in names}
            for row in [*expected[:7], one[0], *expected[7:27], one[1], *expected[27:]]
        ]
        assert [{name: row[name] for name in names} for row in rows_of(found)] == expected
    else:
        assert rows_of(found) == [*expected[:7], *one, *expected[7:]]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_pairs_of_json_with_another_key_stay_compiled(qwen: Any, tmp_path: Path, objective: Any) -> None:
    rows = [{"prompt": [user(f"q {k}")], "chosen": [assistant("a")], "rejected": [assistant("b")]} for k in range(40)]
    expected = gpuload.load_pairs(pa.Table.from_pylist(rows), qwen, objective=objective)
    rows[7]["chosen"][0]["name"] = "bob"
    found = gpuload.load_pairs(write_json(rows, tmp_path), qwen, objective=objective, verify="full", strict=True)
    assert found.report.rows_compiled == 40
    assert rows_of(found) == rows_of(expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_with_tools_and_tool_calls(qwen: Any, objective: Any, tmp_path: Path) -> None:
    """Arrow's types would change such rows: TRL's own preparation gets them one by one."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    rows: list[Row] = [
        {**EXPLICIT[0], "tools": json.dumps([tool])},
        {**EXPLICIT[1], "tools": None},
        {"prompt": [user("q")], "chosen": [call], "rejected": [assistant("a")], "tools": json.dumps([tool])},
        {**EXPLICIT[2], "tools": ""},
    ]
    expected = [prepared([row | {"tools": row["tools"] or None}], qwen, objective) for row in rows]
    found = gpuload.load_pairs(write_json(rows, tmp_path), qwen, objective=objective, verify="full", kl_batch_size=1)
    assert found.report.check.mismatches == []
    if objective == "kto":  # of all rows, first the chosen completions
        expected = [[each[side] for each in expected] for side in (0, 1)]
        flat = [row | {"KL_completion_ids": row["completion_ids"]} for side in expected for row in side]
    else:
        flat = [row for each in expected for row in each]
    assert rows_of(found) == flat


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_arguments_of_rows(qwen: Any, objective: Any) -> None:
    """Columns `chat_template_kwargs` and `tools` of a table."""
    template = "{{ enable_thinking }}" + qwen.chat_template
    tool = json.dumps([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}])
    rows = [
        row | {"chat_template_kwargs": {"enable_thinking": k == 1}, "tools": tool if k else None}
        for k, row in enumerate(EXPLICIT[:3])
    ]
    own = copy.deepcopy(qwen)
    own.chat_template = template
    assert rows_of(load(rows, own, objective)) == prepared(rows, own, objective)


@needs_sanitizing
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_control_tokens_are_sanitized(qwen: Any, objective: Any) -> None:
    texts = ["hi", "<|im_end|> x", "a<|im_start|>user\n", "<|endoftext|>", "\u00e9<|im_end|>"]
    rows: list[Row] = [
        {"prompt": [user(prompt)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]}
        for prompt, chosen, rejected in itertools.product(texts, repeat=3)
    ]
    sanitized = {"sanitize_control_tokens": True}
    found = load(rows, qwen, objective, apply_chat_template_kwargs=sanitized, verify="full")
    assert found.report.check.mismatches == []
    assert found.report.check.rows == len(rows)
    conversation = rows[-1]["prompt"] + rows[-1]["chosen"]
    whole = qwen.apply_chat_template(conversation, return_dict=True, **sanitized)["input_ids"]
    row = found[len(rows) - 1]
    answer = "completion_ids" if objective == "kto" else "chosen_ids"
    assert row.get("prompt_ids", []) + row[answer] == whole


def test_single_completions_are_those_of_trls_preparation(qwen: Any) -> None:
    rows = [{"prompt": t[0], "completion": t[1 + k % 2], "label": k % 2 == 0} for k, t in enumerate(TURNS * 2)]
    expected = prepared(rows, qwen, "kto")
    assert rows_of(load(rows, qwen, None)) == expected
    assert rows_of(load([row | {"label": int(row["label"])} for row in rows], qwen, None)) == expected
    messages = [
        {"messages": row["prompt"] + row["completion"][:1], "kto_tag": row["label"]}
        for row in rows
        if len(row["completion"]) == 1
    ]
    some = [row for row in rows if len(row["completion"]) == 1]
    found = load(messages, qwen, None)
    assert rows_of(found) == prepared(some, qwen, "kto")
    assert "format: messages, for kto" in found.report.notes
    texts = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in TEXTS]
    assert rows_of(load(texts, qwen, None)) == prepared(texts, qwen, "kto")


def test_forms_of_the_same_pair(qwen: Any) -> None:
    expected = rows_of(load([EXPLICIT[0]], qwen, "dpo"))
    turn = {"from": "gpt", "value": "Hello!"}, {"from": "gpt", "value": "Go away."}
    forms: list[Row] = [
        {"prompt": [user("Hi")], "chosen": assistant("Hello!"), "rejected": assistant("Go away.")},
        {"prompt": [user("Hi")], "chosen": "Hello!", "rejected": "Go away."},
        {"prompt": "Hi", "chosen": [assistant("Hello!")], "rejected": [assistant("Go away.")]},
        {"prompt": "Hi", "chosen": assistant("Hello!"), "rejected": assistant("Go away.")},
        {"prompt": "Hi ", **IMPLICIT[0]},
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": turn[0], "rejected": turn[1]},
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": [turn[0]], "rejected": [turn[1]]},
    ]
    for form in forms:
        assert rows_of(load([form], qwen, None)) == expected
    renamed = {"q": "Hi", "good": assistant("Hello!"), "bad": assistant("Go away."), "chosen": 7}
    found = load([renamed], qwen, None, prompt_key="q", chosen_key="good", rejected_key="bad")
    assert rows_of(found) == expected
    system = [{"role": "system", "content": "Be brief."}, user("Hi")]
    form = forms[-1] | {"system": "Be brief."}
    assert rows_of(load([form], qwen, None)) == rows_of(load([EXPLICIT[0] | {"prompt": system}], qwen, None))


def test_unpaired_rows_are_in_the_order_of_trl(qwen: Any) -> None:
    rows = [{"prompt": "n", "chosen": f" {k}", "rejected": f" -{k}"} for k in range(1100)]
    expected = prepared(rows, qwen, "kto", per_device_train_batch_size=3)
    found = load(rows, qwen, "kto", verify="sample", kl_batch_size=3)
    assert rows_of(found) == expected
    assert [found.origin(k)[1] for k in (0, 999, 1000, 2000, 2100, 2199)] == [0, 999, 0, 1000, 1000, 1099]
    assert len(load(rows, qwen, "kto", verify="sample", max_samples=5)) == 10


# -- batches ---------------------------------------------------------------------------------------------------------


def collator_of(objective: str, pad_token_id: int, **settings: Any) -> Any:
    from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

    if objective == "rm":
        return reward_trainer.DataCollatorForPreference(pad_token_id)
    if objective == "dpo":
        return dpo_trainer.DataCollatorForPreference(pad_token_id, **settings)
    return kto_trainer.DataCollatorForUnpairedPreference(pad_token_id, **settings)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_batches_are_those_of_trls_collators(qwen: Any, objective: Any, padding: Any) -> None:
    rows = [row | {"margin": k / 4, "n": k} for k, row in enumerate(EXPLICIT)]
    found = load(rows, qwen, objective, max_length=64)
    collate = collator_of(objective, found.pad_token_id)
    numbers = [3, 0, -1]
    batch = found.batch(numbers, padding=padding)
    expected = collate([found[k] for k in numbers])
    assert set(expected) | {"n", "margin"} == set(batch)
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype
        width = values.shape[1] if values.ndim > 1 else None
        assert torch.equal(batch[name] if width is None else batch[name][:, :width], values)
        if width is not None and padding == "max_length":
            assert batch[name].shape[1] == 64
            assert (batch[name][:, width:] == (found.pad_token_id if name.endswith("input_ids") else 0)).all()
    assert batch["n"].tolist() == [found[k]["n"] for k in numbers]


@pytest.mark.parametrize(("objective", "overlong"), [("dpo", "keep_start"), ("dpo", "keep_end"), ("kto", "keep_start")])
def test_truncation_is_that_of_trls_collators(qwen: Any, objective: Any, overlong: Any) -> None:
    mode = {"truncation_mode": overlong} if objective == "dpo" else {}
    expected = prepared(EXPLICIT, qwen, objective, max_length=31, **mode)
    found = load(EXPLICIT, qwen, objective, max_length=31, overlong=overlong, strict=False)
    assert rows_of(found) == expected
    assert len(expected) < len(EXPLICIT) * (1 + (objective == "kto")) or overlong == "keep_end"
    theirs = collator_of(objective, found.pad_token_id, max_length=31, **mode)(expected)
    ours = found.batch(range(len(found)))
    assert all(torch.equal(ours[name], values) for name, values in theirs.items())


def test_long_rows_are_dropped(qwen: Any) -> None:
    expected = prepared(EXPLICIT, qwen, "rm", max_length=34)
    found = load(EXPLICIT, qwen, "rm", max_length=34, strict=False)
    assert 0 < len(expected) < len(EXPLICIT)
    assert rows_of(found) == expected
    assert found.report.overlong == len(EXPLICIT) - len(expected)
    assert found.report.longest <= 34
    # Each completion of a pair is dropped or kept by itself.
    single = load(EXPLICIT, qwen, "kto", max_length=34, strict=False)
    sizes = [len(row["prompt_ids"] + row["completion_ids"]) for row in prepared(EXPLICIT, qwen, "kto")]
    assert len(single) == sum(size <= 34 for size in sizes)
    assert max(single.batch(range(len(single)))["input_ids"].shape) <= 34


def test_loaders_resume_and_datasets_are_pickled(qwen: Any) -> None:
    for objective in OBJECTIVES:
        found = load(EXPLICIT * 2, qwen, objective)
        loader = found.loader(2, shuffle=True, seed=1)
        batches = iter(loader)
        next(batches)
        state, expected = loader.state_dict(), next(batches)
        resumed = pickle.loads(pickle.dumps(found)).loader(2, shuffle=True, seed=1)
        resumed.load_state_dict(state)
        assert torch.equal(next(iter(resumed))["input_ids"], expected["input_ids"])


def test_a_state_of_another_group_size_is_refused(qwen: Any) -> None:
    state = load(EXPLICIT, qwen, "kto", kl_batch_size=4).loader(2).state_dict()
    with pytest.raises(gpuload.GpuloadError, match="kl_batch_size was 4, is 5"):
        load(EXPLICIT, qwen, "kto", kl_batch_size=5).loader(2).load_state_dict(state)


# -- tokenizers and conversations ------------------------------------------------------------------------------------


def tokenizer_and_template(name: str) -> tuple[Any, str | None]:
    """A real tokenizer, and the template to use with it if it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    if tokenizer.chat_template is not None:
        return tokenizer, None
    if name == "gpt-oss":
        return tokenizer, (TEMPLATES / "gptoss.jinja").read_text()
    return tokenizer, "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def published(file: str, rows: int) -> list[Row]:
    """Rows of a published file, as TRL takes them."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}

    def message(turn: Row) -> Row:
        return turn if "role" in turn else {"role": roles[turn["from"]], "content": turn["value"]}

    made = json.loads((SHARED / "datasets" / "chats_and_pairs" / file).read_text())[:rows]
    if "messages" in made[0]:
        return [
            {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], "label": row["label"]} for row in made
        ]
    return [
        {
            "prompt": [message(turn) for turn in row["conversations"]],
            "chosen": [message(row["chosen"])],
            "rejected": [message(row["rejected"])],
        }
        for row in made
    ]


@shared
@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v3", "gemma3", "gpt-oss", "gpt2", "llama3.1-instruct", "mistral-nemo", "olmo2-dolma2"),
        *("qwen2.5-instruct", "qwen3", "smollm"),
    ],
)
def test_published_files_with_real_tokenizers(name: str) -> None:
    tokenizer, template = tokenizer_and_template(name)
    default = tokenizer.chat_template
    tokenizer.chat_template = template or default
    cases: list[tuple[str, Any]] = [
        ("dpo_en_demo.json", "dpo"),
        ("dpo_zh_demo.json", "rm"),
        ("dpo_zh_demo.json", "kto"),
    ]
    for file, objective in [*cases, ("kto_en_demo.json", "kto")]:
        rows = published(file, 24)
        overlong: Any = "keep_start" if objective != "rm" else "drop"
        expected = prepared(rows, tokenizer, objective, max_length=1500)
        path = str(SHARED / "datasets" / "chats_and_pairs" / file)
        found = gpuload.load_pairs(
            path, tokenizer, objective=objective, max_samples=24, max_length=1500, overlong=overlong, pad_token_id=0,
            verify="full",
        )  # fmt: skip
        assert found.report.check.mismatches == []
        assert set(found.report.rejected) <= {"the prompt alone fills max_length=1500"}
        assert rows_of(found) == expected


TEXT = st.text("a \n<|im_end|>é👋你", max_size=12)


@examples(25)
@given(
    st.lists(
        st.tuples(st.lists(TEXT, min_size=1, max_size=3), TEXT, TEXT, st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(OBJECTIVES),
    st.booleans(),
)
def test_any_pairs(qwen: Any, texts: list[tuple[list[str], str, str, bool]], objective: Any, implicit: bool) -> None:
    rows = []
    for prompt, chosen, rejected, long in texts:
        start = [user(text) if k % 2 == 0 else assistant(text) for k, text in enumerate(prompt)]
        first, second = [assistant(chosen)], [assistant(rejected)] + [user("more")] * long
        row = {"chosen": start + first, "rejected": start + second}
        rows.append(row if implicit else {"prompt": start, "chosen": first, "rejected": second})
    assert rows_of(load(rows, qwen, objective, progress=False)) == prepared(rows, qwen, objective)


@examples(25)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=6), st.sampled_from(OBJECTIVES))
def test_any_texts(qwen: Any, texts: list[tuple[str, str, str]], objective: Any) -> None:
    rows: list[Row] = [dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in texts]
    assert rows_of(load(rows, qwen, objective, progress=False)) == prepared(rows, qwen, objective)


# -- prefixes --------------------------------------------------------------------------------------------------------


def test_prefixes_are_encoded_once(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.kinds.pairs.engine import PairEngine

    encoded: list[str] = []
    right = PairEngine.ids

    def ids(self: Any, text: Any) -> Any:
        encoded.extend(text.to_pylist())
        return right(self, text)

    monkeypatch.setattr(PairEngine, "ids", ids)
    rows = [
        {"prompt": [user(f"a long prompt {k} " * 50)], "chosen": [assistant("x")], "rejected": [assistant("y")]}
        for k in range(5)
    ]
    for objective in OBJECTIVES:
        encoded.clear()
        found = load(rows, qwen, objective)
        assert all("".join(encoded).count(f"a long prompt {k} ") == 50 for k in range(5))
        assert len(found.report.check.mismatches) == 0


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        ([{"content": "<s>"}], True),
        ([{"content": "<s>", "normalized": True}], False),
        ([{"content": "<s>", "lstrip": True}], False),
        ([{"content": "<s>", "single_word": True}], False),
        ([{"content": "<s>"}, {"content": "<s>x", "single_word": True}], False),
        ([{"content": "<s>"}, {"content": "a<"}], False),
        ([{"content": "<s>"}, {"content": "a<s>b"}], False),
        ([{"content": "<s>"}, {"content": "<s><s>"}], False),
        ([{"content": "<s>"}, {"content": "<s>a"}], True),
        ([{"content": " <s>"}], False),
    ],
)
def test_tokens_in_front_of_which_texts_may_be_cut(tokens: list[Row], allowed: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from gpuload.kinds.prefixes import cutting_tokens
    from gpuload.reference.reference import Reference

    pieces = {character: number for number, character in enumerate("<s>xab ")}
    backend = Tokenizer(models.BPE(pieces, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken(**{"normalized": False} | token) for token in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = cutting_tokens(Reference(tokenizer, chat_template=None), ["a" + token["content"] for token in tokens])
    assert (tokens[0]["content"].encode() in found) == allowed
    # Where a text is cut, both parts by themselves have the same ids.
    for token in found:
        for text in ("a" + token.decode() + "b", "a <s>x", "a<s>b", "<s><s>x<s>", "a<<s>", " <s> s"):
            at = text.rfind(token.decode())
            if at > 0:
                whole = tokenizer.encode(text, add_special_tokens=False)
                parts = [tokenizer.encode(part, add_special_tokens=False) for part in (text[:at], text[at:])]
                assert whole == parts[0] + parts[1]


# -- caches, mismatches, bad input -----------------------------------------------------------------------------------


def test_the_token_cache_keeps_objectives_apart(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = tmp_path / "pairs.parquet"
    rows = [row | {"margin": 0.5, "other": [assistant("z")]} for row in EXPLICIT]
    pq.write_table(pa.Table.from_pylist(rows), file)
    options: list[Row] = [{"objective": each} for each in OBJECTIVES] + [{"rejected_key": "other"}]
    options.append({"chosen_key": "rejected", "rejected_key": "chosen"})
    cold = [rows_of(gpuload.load_pairs(str(file), qwen, **each)) for each in options]
    for each, expected in zip(options, cold, strict=True):
        warm = gpuload.load_pairs(str(file), qwen, **each)
        assert warm.report.from_cache == [str(file)]
        assert rows_of(warm) == expected
    assert np.unique([str(rows) for rows in cold]).size == len(cold)


def test_the_token_cache_of_json_files_keeps_columns_apart(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    path = write_json(EXPLICIT, tmp_path)
    one = gpuload.load_pairs(path, qwen)
    other = gpuload.load_pairs(path, qwen, chosen_key="rejected", rejected_key="chosen")
    assert [row["chosen_ids"] for row in rows_of(one)] == [row["rejected_ids"] for row in rows_of(other)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rows", [EXPLICIT, TEXTS], ids=["messages", "texts"])
def test_a_wrong_part_is_noticed(qwen: Any, monkeypatch: pytest.MonkeyPatch, rows: list[Row], objective: Any) -> None:
    """Then the tokenizer itself does everything, with the same result."""
    from gpuload.kinds.pairs import engine

    table = pa.Table.from_pylist(rows)
    right = engine.PairEngine.encode

    def wrong(self: Any, text: Any) -> Any:
        made = right(self, text)
        if not self.by_prompt:
            made.ids.values[-1] ^= 1 << 30
        return made

    monkeypatch.setattr(engine.PairEngine, "encode", wrong)
    with pytest.warns(UserWarning, match="differs from the tokenizer"):
        found = gpuload.load_pairs(table, qwen, objective=objective, verify="full")
    with pytest.raises(MismatchError):
        gpuload.load_pairs(table, qwen, objective=objective, verify="full", strict=True)
    monkeypatch.undo()
    assert found.report.engine.startswith("cpu: rendered and encoded by")
    assert rows_of(found) == rows_of(gpuload.load_pairs(table, qwen, objective=objective))


GOOD = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int8(), pa.bool_()], ids=str)
def test_labels_are_numbers_of_any_type(qwen: Any, kind: pa.DataType) -> None:
    labels = pa.array([1, 0, None, 1]).cast(kind)
    pairs = gpuload.load_pairs(pa.table({"prompt": ["a"] * 4, "completion": ["b"] * 4, "label": labels}), qwen)
    assert pairs.labels.tolist() == [True, False, True]
    assert pairs.report.rejected == {"label is None, not true or false": 1}


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ([GOOD, GOOD | {"rejected": None}], {}, "rejected is null"),
        ([GOOD, GOOD | {"chosen": []}], {}, "chosen is an empty list"),
        ([GOOD, GOOD | {"prompt": []}], {}, "prompt is an empty list"),
        ([GOOD, GOOD | {"prompt": [{"role": "user", "content": None}]}], {}, "content of message 0 is null"),
        ([GOOD, GOOD | {"prompt": "text"}], {}, None),
        ([TEXTS[0], TEXTS[0] | {"chosen": None}], {}, "chosen is null"),
        ([TEXTS[0], {key: value for key, value in TEXTS[0].items() if key != "prompt"}], {}, "prompt is null"),
        ([IMPLICIT[0], {"chosen": IMPLICIT[0]["chosen"], "rejected": IMPLICIT[3]["rejected"]}], {},
         "chosen and rejected have no common first message: their prompts differ"),
        ([IMPLICIT[0], {"chosen": [user("x")], "rejected": [user("x")]}], {}, "no message before the answer"),
        ([IMPLICIT[0], {"chosen": [], "rejected": IMPLICIT[0]["rejected"]}], {}, "chosen is an empty list"),
        ([IMPLICIT_TEXTS[0], {"chosen": "a", "rejected": "b"}], {}, "no common beginning"),
        ([IMPLICIT_TEXTS[0], {"chosen": "", "rejected": "b"}], {}, "no common beginning"),
        ([IMPLICIT[0] | {"prompt": "Hi"}, IMPLICIT[0] | {"prompt": "Bye"}], {}, "the prompt is not in the messages"),
        ([GOOD | {"margin": 1}, GOOD | {"margin": None}], {"objective": "rm"}, "margin is None, not a number"),
        ([{"prompt": "a", "completion": "b", "label": 1}, {"prompt": "a", "completion": "b", "label": 2}], {},
         "label is 2, not true or false"),
        ([{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": "false"}], {},
         "label is 'false', not true or false"),
        ([{"messages": [user("a"), assistant("b")], "label": True}, {"messages": [user("a")], "label": True}], {},
         "messages do not end with an answer of an assistant"),
        ([{"messages": [user("a"), assistant("b")], "label": True}, {"messages": [assistant("a")], "label": True}], {},
         "there is no message before the answer"),
        ([GOOD, GOOD | {"prompt": [user("long " * 40)]}], {"max_length": 40, "overlong": "keep_start"},
         "the prompt alone fills max_length=40"),
        ([GOOD, GOOD | {"chosen": [{"role": "assistant", "content": "\ud800"}]}], {}, "lone surrogate"),
    ],
)  # fmt: skip
def test_bad_rows_are_counted(qwen: Any, rows: list[Row], options: Row, reason: str | None, tmp_path: Path) -> None:
    path = write_json(rows, tmp_path)
    found = gpuload.load_pairs(path, qwen, **options)
    assert rows_of(found)[:1] == rows_of(gpuload.load_pairs(write_json(rows[:1], tmp_path), qwen, **options))
    if reason is None:
        assert found.report.rejected == {}
        return
    assert len(found) == 1
    ((counted, number),) = found.report.rejected.items()
    assert reason in counted
    assert number == 1
    with pytest.raises(DataError, match="row 1: "):
        gpuload.load_pairs(write_json(rows, tmp_path), qwen, strict=True, **options)


def test_pairs_of_different_lengths_and_equal_pairs(qwen: Any) -> None:
    rows = [*EXPLICIT, GOOD | {"chosen": GOOD["chosen"] * 3}]
    found = load(rows, qwen, "dpo")
    assert rows_of(found) == prepared(rows, qwen, "dpo")
    assert found.report.counts["pairs with equal chosen and rejected sequences"] == 1
    for objective in ("rm", "kto"):
        assert load(rows, qwen, objective).report.counts["pairs with equal chosen and rejected sequences"] == 1


def test_rejected_pairs_are_not_counted_as_encoded_otherwise(qwen: Any) -> None:
    broken = GOOD | {"chosen": [{"role": "assistant", "content": None}]}
    found = load([GOOD, broken], qwen, "dpo", strict=False)
    assert found.report.rejected == {"content of message 1 is null": 1}
    assert "encoded otherwise" not in str(found.report)


def test_a_template_that_reorders_messages_is_noted(qwen: Any) -> None:
    template = "{% for m in messages | reverse %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    found = load([GOOD], qwen, "dpo", chat_template=template)
    assert "1 row whose prompt alone is encoded otherwise than in front of a completion" in str(found.report)
    qwen.chat_template, before = template, qwen.chat_template
    try:
        assert rows_of(found) == prepared([GOOD], qwen, "dpo")
    finally:
        qwen.chat_template = before


def test_a_template_without_answers_gives_no_rows(qwen: Any) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="a completion has no tokens"):
        gpuload.load_pairs(pa.Table.from_pylist([GOOD]), qwen, chat_template=template)


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"chosen": ["a"], "response": ["b"]}, {}, DataError, "closest format is implicit.*rejected missing"),
        ({"chosen": [1], "rejected": [2]}, {}, DataError, "closest format is implicit, which has .* of another type"),
        ({"prompt": ["a"], "completion": ["b"]}, {"objective": "kto"}, DataError, "not a known format"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"format": "sharegpt"}, DataError, "not format='sharegpt'"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"format": "share"}, OptionError, "did you mean sharegpt"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"objective": "ppo"}, OptionError, "objective='ppo'"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"chosen_key": ""}, OptionError, "chosen_key=''"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"kl_batch_size": 0}, OptionError, "kl_batch_size=0"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"max_length": 0}, OptionError, "max_length=0"),
        ({"chosen": ["a"], "rejected": ["b"]}, {"overlong": "cut"}, OptionError, "overlong='cut'"),
    ],
)
def test_what_cannot_be_loaded(
    qwen: Any, table: dict[str, Any], options: Row, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gpuload.load_pairs(pa.table(table), qwen, **options)


def test_files_of_different_formats(qwen: Any, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(TEXTS), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(IMPLICIT_TEXTS), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="different formats .*a.parquet is preference, .*b.parquet is implicit"):
        gpuload.load_pairs(str(tmp_path / "*.parquet"), qwen)
    pq.write_table(pa.Table.from_pylist([row | {"margin": 1.0} for row in TEXTS]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="column 'margin' is in some files only, such as .*b.parquet"):
        gpuload.load_pairs(str(tmp_path / "*.parquet"), qwen, objective="rm")


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", core(OBJECTIVES, "kto"))
def test_training_has_the_losses_of_trls_trainers(qwen: Any, objective: str, tmp_path: Path) -> None:
    """TRL's trainer prepares its data itself; the same trainer computes the losses of our batches."""
    from datasets import Dataset
    from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

    tokenizer = small_tokenizer(qwen.chat_template)
    rows = [
        {
            "prompt": [user(f"question {k} " * (k % 3 + 1))],
            "chosen": [assistant("good " * (k % 5 + 1))],
            "rejected": [assistant("bad " * (k % 4 + 1))],
        }
        for k in range(10)
    ]
    kind, config = trainer_of(objective)
    args = config(
        output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, max_steps=5, per_device_train_batch_size=2,
        learning_rate=1e-2, max_length=256, gradient_checkpointing=False, logging_steps=1,
    )  # fmt: skip

    def trainer() -> Any:
        model = small_model(Qwen2ForSequenceClassification if objective == "rm" else Qwen2ForCausalLM, tokenizer)
        before = {} if objective == "rm" else {"ref_model": small_model(Qwen2ForCausalLM, tokenizer)}
        data = Dataset.from_list(rows)
        return kind(model=model, args=args, processing_class=tokenizer, train_dataset=data, **before)

    def losses(made: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
        made.model.train()
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        found = []
        for batch in batches:
            loss = made.compute_loss(made.model, dict(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    one = trainer()
    names = [name for name in one.train_dataset.column_names if name in IDS[objective]]
    prepared_rows = [{name: row[name] for name in names} for row in one.train_dataset]
    theirs = [one.data_collator(prepared_rows[2 * k : 2 * k + 2]) for k in range(5)]
    found = load(rows, tokenizer, objective, max_length=256, kl_batch_size=2)
    ours = [{name: batch[name] for name in theirs[0]} for batch, _ in zip(found.loader(2), range(5), strict=False)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in theirs[0])
    with one_thread():
        expected = losses(one, theirs)
        assert len(set(expected)) == 5
        assert losses(trainer(), ours) == expected


@pytest.mark.parametrize("key", ["prompt_key", "chosen_key", "rejected_key"])
@pytest.mark.parametrize("objective", ["dpo", "rm", "kto"])
def test_a_column_that_is_named_must_be_there(qwen: Any, key: str, objective: Any) -> None:
    """Without their prompts, these answers would be read as implicit pairs; without their answers, with labels."""
    columns = {
        "prompt": ["q"],
        "chosen": ["It is a"],
        "rejected": ["It is b"],
        "completion": ["It is c"],
        "label": [True],
    }
    with pytest.raises(DataError, match="no column 'question'"):
        gpuload.load_pairs(pa.table(columns), qwen, objective=objective, **{key: "question"})


def test_first_messages_that_differ_in_nulls_only(qwen: Any) -> None:
    answer = {"role": "assistant", "content": "a"}
    chosen = pa.array([[{"role": "user", "content": "q", "name": None}, answer | {"name": "n"}]])
    rejected = pa.array([[{"role": "user", "content": "q"}, answer]])
    table = pa.table({"chosen": chosen, "rejected": rejected})
    with pytest.raises(DataError, match="differ in nulls only: pass drop_nulls=True"):
        gpuload.load_pairs(table, qwen)
    assert len(gpuload.load_pairs(table, qwen, drop_nulls=True)) == 1


def test_margins_that_batches_cannot_have(qwen: Any, tmp_path: Path) -> None:
    margins = [1, float("nan"), 2.5, float("inf"), -float("inf"), 3e300, 10**400, 2**70]
    lines = [json.dumps(EXPLICIT[0] | {"margin": margin}) for margin in margins]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    pairs = gpuload.load_pairs(str(tmp_path / "rows.jsonl"), qwen, objective="rm")
    values = ("nan", "inf", "-inf", "3e+300", "1" + "0" * 39)
    assert pairs.report.rejected == {f"margin is {value}, not a number of 32 bits": 1 for value in values}
    assert pairs.batch(range(3))["margin"].tolist() == [1, 2.5, 2**70]
