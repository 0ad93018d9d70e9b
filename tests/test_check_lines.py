"""The lines that `gpuload check` prints: they load the rows that were checked, or say why a trainer does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import user

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import DataError
from gpuload.inspect.checks.lines import kept_by, lines_for, suggested_limit
from gpuload.inspect.checks.run import Checked, checked

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{{ mark }}<|im_end|>{% endif %}\n{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(n: int, **more: Any) -> list[dict[str, Any]]:
    return [*user(f"Is {n} a prime?"), {"role": "assistant", "content": f"Let me see: {n}.", **more}]


def pair(n: int) -> dict[str, Any]:
    return {
        "prompt": user(f"q {n}"),
        **{k: [{"role": "assistant", "content": f"{k} {n}"}] for k in ("chosen", "rejected")},
    }


def sharegpt(n: int) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": f"a {n}"}]}


def alpaca(n: int) -> dict[str, Any]:
    return {"instruction": f"q {n}", "input": "", "output": f"a {n}"}


def in_file(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines_of(rows: Any, tokenizer: Any, trainer: Any = None, limit: int | None = None, **options: Any) -> str:
    return "\n".join(lines_for(checked(rows, tokenizer, trainer=trainer, limit=limit, **options), trainer, limit))


DATA: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "messages": ([{"messages": chat(n)} for n in range(6)], {}),
    "another key": ([{"dialog": chat(n), "messages": chat(n + 50)} for n in range(6)], {"messages_key": "dialog"}),
    "last": ([{"messages": chat(n) + chat(n + 9)} for n in range(6)], {"loss_on": "last"}),
    "marks": ([{"messages": chat(n, train=False) + chat(n, train=True)} for n in range(6)], {}),
    "template": (
        [{"messages": chat(n)} for n in range(6)],
        {"chat_template": TEMPLATE, "apply_chat_template_kwargs": {"mark": "'\"!"}},
    ),
    "normalized": (
        [{"messages": chat(n, content=None, tool_calls=[CALL])} for n in range(6)],
        {"normalize_messages": "auto", "drop_nulls": True},
    ),
    "format": ([{"messages": chat(n), "text": f"text {n}"} for n in range(6)], {"format": "text"}),
    "labels": ([{"messages": chat(n), "label": n % 2 == 0} for n in range(6)], {}),
    "sharegpt": ([sharegpt(n) for n in range(6)], {}),
    "alpaca": ([alpaca(n) for n in range(6)], {}),
    "prompts": ([{"prompt": user(f"q {n}"), "n": n} for n in range(6)], {}),
    "questions": ([{"question": user(f"q {n}")} for n in range(6)], {"prompt_key": "question"}),
    "plain": ([{"question": f"q {n}"} for n in range(6)], {"prompt_key": "question", "chat_template": None}),
    "pairs": ([pair(n) for n in range(6)], {}),
    "cut": ([{"messages": chat(n)} for n in range(6)], {"limit": 20, "overlong": "keep_end"}),
    "cut prompts": ([{"prompt": user("long " * n)} for n in range(40)], {"limit": 40, "overlong": "keep_start"}),
}


@pytest.mark.parametrize("name", DATA)
def test_pasted_lines_load_the_rows_that_were_checked(qwen_folder: str, tmp_path: Path, name: str) -> None:
    rows, options = DATA[name]
    file = in_file(tmp_path / "a.jsonl", rows)
    found = checked(file, qwen_folder, **options)
    names: dict[str, Any] = {}
    exec("\n".join(lines_for(found, None, options.get("limit"))), names)
    loaded = names["rows"]
    given = {key: value for key, value in options.items() if key not in ("limit", "overlong")}
    load = {"prompts": gpuload.load, "chats": gpuload.load_chats, "pairs": gpuload.load_pairs}[found.kind]
    if found.kind == "prompts":
        given |= {"max_prompt_length": 4096}
    if name == "labels":
        given["format"] = "messages"
    whole = load(file, qwen_folder, **given)
    limit = options.get("limit", 4096)
    cut = {"keep_end": slice(-limit, None), "keep_start": slice(limit)}.get(options.get("overlong", ""), slice(None))
    columns = [key for key in whole[0] if key.endswith("ids") and key != "position_ids"]

    def ids(row: Any, column: str) -> list[int]:
        if found.kind != "prompts":
            return list(row[column])
        return row["input_ids"][row["attention_mask"] != 0].tolist()  # type: ignore[no-any-return]

    for column in columns:
        assert [ids(row, column)[cut] for row in whole] == [ids(row, column) for row in loaded]
    assert len(loaded) == len(rows)


def test_the_columns_of_the_file_are_named(qwen_folder: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    file = in_file(tmp_path / "a.jsonl", [{"dialog": chat(n), "tools": tools} for n in range(4)])
    text = {each: lines_of(file, qwen_folder, each, messages_key="dialog") for each in ("verl", "slime", "nemo-rl")}
    assert "data.messages_key=dialog" in text["verl"]
    assert "--input-key dialog\n--tool-key tools" in text["slime"]
    assert "+data.train.chat_key=dialog" in text["nemo-rl"]
    assert ".rename_column(\"dialog\", 'messages')" in lines_of(file, qwen_folder, "trl", messages_key="dialog")
    plain = in_file(tmp_path / "b.jsonl", [{"messages": chat(n)} for n in range(4)])
    assert "--tool-key" not in lines_of(plain, qwen_folder, "slime")


@pytest.mark.parametrize("rows", [sharegpt, alpaca])
def test_formats_that_trainers_do_not_read(qwen_folder: str, tmp_path: Path, rows: Any) -> None:
    file = in_file(tmp_path / "a.jsonl", [rows(n) for n in range(4)])
    for trainer in ("verl", "slime", "nemo-rl"):
        text = lines_of(file, qwen_folder, trainer)
        assert all(line.startswith("# ") for line in text.splitlines())
        assert f"not in the format {rows.__name__}" in text
    text = lines_of(file, qwen_folder, "trl")
    assert "assistant_only_loss" not in text
    assert (
        f"# gpuload prepare {file} --tokenizer {qwen_folder} --loss-on assistant --max-length 64 --export sft" in text
    )


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (alpaca, {}),
        (lambda n: {"messages": chat(n)}, {"loss_on": "last", "chat_template": TEMPLATE, "drop_nulls": True}),
        (lambda n: {"conversations": sharegpt(n)["conversations"][:1], "chosen": {"from": "gpt", "value": "a"},
                    "rejected": {"from": "gpt", "value": "b"}}, {}),
    ],
)  # fmt: skip
def test_what_is_prepared_for_trl(
    qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, options: dict[str, Any]
) -> None:
    import shlex

    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    file = in_file(tmp_path / "a.jsonl", [rows(n) for n in range(4)])
    if "chat_template" in options:
        (tmp_path / "t.jinja").write_text(options["chat_template"])
        options = {**options, "chat_template": "t.jinja"}
    text = lines_of(file, qwen_folder, "trl", **options)
    compile(text, "lines", "exec")
    command = next(line for line in text.splitlines() if line.startswith("# gpuload prepare "))
    assert main(shlex.split(command)[2:]) == 0
    names: dict[str, Any] = {}
    exec("\n".join(line for line in text.splitlines() if "load" in line and line[0] != "#"), names)
    assert len(names["train_dataset"]) == 4


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime", "nemo-rl", None])
def test_weights_that_a_trainer_does_not_read(qwen_folder: str, tmp_path: Path, trainer: Any) -> None:
    for weight, told in ((0.25, trainer is not None), (1, False)):
        path = in_file(tmp_path / "rows.jsonl", [{"messages": chat(n, weight=weight)} for n in range(3)])
        assert ("does not read weights of answers" in lines_of(path, qwen_folder, trainer)) == told


def test_several_files(qwen_folder: str, tmp_path: Path) -> None:
    files = [in_file(tmp_path / f"{k}.jsonl", [{"messages": chat(n)} for n in range(k, k + 3)]) for k in (1, 9)]
    for trainer, line in (("slime", "--prompt-data all.jsonl"), ("nemo-rl", "+data.train.data_path=all.jsonl")):
        text = lines_of(files, qwen_folder, trainer)
        assert "reads one file: write the rows of all 2 to all.jsonl first" in text
        assert line in text.splitlines()
    assert all(file in lines_of(files, qwen_folder, "verl") for file in files)


def made(kind: Any, *lengths: int, **more: Any) -> Checked:
    return Checked([], ["a"], 9, kind, "assistant", np.sort(np.array(lengths, np.int64)), "t", "messages", **more)


def test_each_limit_is_that_of_the_trainer() -> None:
    chats, far = made("chats", *range(1, 65)), made("chats", *[100] * 1000, 100_000)
    assert "data.max_input_seq_length=65" in lines_for(chats, "nemo-rl", None)  # it drops rows of as many tokens
    assert "data.max_input_seq_length=100" in lines_for(made("chats", 7, 99), "nemo-rl", 100)
    assert suggested_limit(far) == 128
    assert suggested_limit(far, "verl") == 100_032  # it raises an error for longer ones
    assert {"data.max_length=100032", "data.truncation=error"} <= set(lines_for(far, "verl", None))
    assert {"data.max_length=128", "data.truncation=right"} <= set(lines_for(far, "verl", 128))
    assert kept_by(far, "verl", 128) == "a limit of 128 tokens cuts 1 row"
    assert kept_by(far, "trl", 128) == "a limit of 128 tokens cuts 1 row"
    assert kept_by(far, "nemo-rl", 128) == "a limit of 128 tokens drops 1 row"
    assert kept_by(far, "slime", None) == "slime has no limit for conversations, and the longest has 100,000 tokens"
    left = lines_for(made("chats", 9, 99, overlong="keep_end"), "verl", 10)
    assert left[-2:] == ["data.truncation=left", "data.pad_mode=right"]


def test_no_lines_without_rows(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trainer in (None, "verl", "trl", "slime", "nemo-rl"):
        assert lines_for(made("chats"), trainer, None) == []  # type: ignore[arg-type]
    assert lines_for(made("chats", 9), None, 5) == []
    file = in_file(tmp_path / "a.jsonl", [{"messages": user(f"no answer {n}")} for n in range(3)])
    assert main(["check", file, "--tokenizer", qwen_folder]) == 1
    assert capsys.readouterr().out.endswith("\n\nfor Python; no row can be loaded, so there is nothing to paste\n")


def test_options_that_are_not_given_are_not_printed(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = in_file(tmp_path / "a.jsonl", [alpaca(n) for n in range(3)])
    for arguments, line in (
        ((), f'"{qwen_folder}", loss_on="assistant", max_length=64,'),
        (("--for", "trl"), f"{qwen_folder} --loss-on assistant --max-length 64 --export sft sft"),
        (("--drop-nulls",), f'"{qwen_folder}", loss_on="assistant", drop_nulls=True, max_length=64,'),
    ):
        assert main(["check", file, "--tokenizer", qwen_folder, *arguments]) == 0
        assert line in capsys.readouterr().out


def test_data_for_kto(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = in_file(tmp_path / "a.jsonl", [{"messages": chat(n), "label": n % 2 == 0} for n in range(4)])
    with pytest.raises(DataError, match=r"data for KTO\. Commands do not read it; in Python, gpuload"):
        gpuload.check(file, qwen_folder, kind="pairs")
    assert len(gpuload.load_pairs(file, qwen_folder, objective="kto")) == 4
    assert lines_of(file, qwen_folder).startswith("# this learns bad answers as good ones")


def test_a_negative_number_of_rows_is_an_error(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = in_file(tmp_path / "a.jsonl", [{"messages": chat(n)} for n in range(4)])
    arguments = ["diff", file, "--tokenizer", qwen_folder, "--against-template-kwargs", '{"x": 1}', "--rows", "-1"]
    assert main(arguments) == 1
    assert capsys.readouterr().err == "gpuload: --rows -1: expected an integer >= 0\n"
