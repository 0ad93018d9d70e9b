"""`gpuload inspect` and `gpuload check` of rows as served, and the lines that they print."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from test_served import BLOCKS, MESSAGES, STRIPPING
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.inspect.checks.lines import lines_for
from gpuload.inspect.checks.run import checked
from gpuload.inspect.data import open_data
from gpuload.inspect.page import page_of
from gpuload.inspect.statistics import statistics_of
from gpuload.pipeline.run import run
from gpuload.sources.types import as_json

ASK, ANSWER = MESSAGES[0], {"role": "assistant", "content": "4."}
EMPTY = {"role": "assistant", "content": "<think>\n\n</think>\n\nb"}
KEEPING = STRIPPING.replace("loop.index0 > ns.last", "m.reasoning_content")
WITHOUT_SWITCH = STRIPPING.replace("enable_thinking", "enable_thoughts")


def found(rows: list[Any], template: str = STRIPPING, **options: Any) -> dict[str, Any]:
    table = pa.table({"messages": as_json(rows)})
    made = gpuload.check(table, small_tokenizer(template), turns="served", token_cache=False, **options)
    return {each.check: each for each in made}


def chats(*more: Any) -> list[Any]:
    """Conversations in which nothing is wrong, and others."""
    asked = [[{"role": "user", "content": f"{k} + {k}?"}, *MESSAGES[1:]] for k in range(3)]
    return [*asked, *more]


def test_rows_are_checked_as_they_are_served() -> None:
    """The template drops reasoning of earlier answers in one row per conversation, and in none as served."""
    table = pa.table({"messages": as_json(chats())})
    whole = {each.check for each in gpuload.check(table, small_tokenizer(STRIPPING), token_cache=False)}
    assert whole == {"reasoning dropped", "answers rewritten", "all loss"} - {"all loss"}
    assert found(chats()) == {}


def test_answers_that_are_not_learned() -> None:
    """They are counted in their conversations, by reason; a conversation without any has no loss."""
    rows = chats([*MESSAGES, ASK, ANSWER], [ASK, ANSWER], [ASK])
    made = found(rows, WITHOUT_SWITCH)
    assert made["turns not learned"].rows == [3]
    assert "1 of its answers: the answer has no reasoning" in made["turns not learned"].example
    assert made["no loss"].rows == [4, 5]


def test_learned_empty_thinking_blocks() -> None:
    """Those that the template inserts are warned of, and those of the data are counted."""
    made = found(chats([ASK, ANSWER]), missing_reasoning="learn")
    assert made["inserted text learned"].rows == [3]
    assert "empty thinking learned" not in made
    made = found(chats([ASK, EMPTY]), KEEPING)
    assert made["empty thinking learned"].rows == [3]
    assert made["empty thinking learned"].level == "info"
    assert "inserted text learned" not in made
    assert "inserted text learned" not in found(chats([ASK, ANSWER]))


def test_limits() -> None:
    """A conversation is over the limit if one of its rows is. Cut rows end behind whole answers."""
    rows = chats([ASK, MESSAGES[1]])
    longest = max(len(row["input_ids"]) for row in _loaded(rows)[:])
    made = found(rows, limit=longest - 1)
    assert made["over the limit"].rows == [0, 1, 2]
    assert f"{longest} tokens, and the limit is {longest - 1} in the row that ends with message 3" in (
        made["over the limit"].example
    )
    cut = found(rows, limit=longest - 1, overlong="keep_start")
    assert set(cut) == {"over the limit"}
    assert found(rows, limit=20, overlong="keep_start")["no loss"].rows == [0, 1, 2, 3]
    with pytest.raises(OptionError, match="keep_end"):
        found(rows, limit=20, overlong="keep_end")


def test_blocks_that_leave_the_end_out() -> None:
    outside = BLOCKS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert found(chats(), outside)["end not learned"].rows == [0, 1, 2]


def test_sampled_ids() -> None:
    """Their texts are what the ids stand for."""
    tokenizer = small_tokenizer(STRIPPING)
    ids = tokenizer.encode("<think>\ntwo and two\n</think>\n\n4.<|im_end|>")
    assert found(chats([ASK, MESSAGES[1] | {"token_ids": ids}])) == {}
    cut = found(chats([ASK, MESSAGES[1] | {"token_ids": ids[:-1]}]))
    assert cut["answer cut"].rows == [3]


def _loaded(rows: list[Any], **options: Any) -> Any:
    return gpuload.load_chats(
        pa.table({"messages": as_json(rows)}), small_tokenizer(STRIPPING), turns="served", token_cache=False, **options
    )


# -- lines to paste -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in chats([ASK, ANSWER])))
    return str(path)


def lines(file: str, tokenizer: Any, trainer: Any, **options: Any) -> str:
    made = checked([file], tokenizer, trainer=trainer, turns="served", token_cache=False, **options)
    return "\n".join(lines_for(made, trainer, options.get("limit")))


def test_pasted_lines_load_the_rows(file: str, tmp_path: Path) -> None:
    small_tokenizer(STRIPPING).save_pretrained(tmp_path / "tokenizer")
    options = {"missing_reasoning": "learn", "thinking": ("<think>\n", "\n</think>\n\n")}
    names: dict[str, Any] = {}
    exec(lines(file, str(tmp_path / "tokenizer"), None, limit=70, overlong="keep_start", **options), names)
    expected = gpuload.load_chats(
        file, tmp_path / "tokenizer", turns="served", max_length=70, overlong="keep_start", **options
    )
    assert names["rows"][:] == expected[:]


def test_lines_of_trainers(file: str, tmp_path: Path) -> None:
    tokenizer = small_tokenizer(STRIPPING)
    text = lines(file, tokenizer, "trl", missing_reasoning="learn")
    assert "dataset_kwargs={'turns': 'served', 'missing_reasoning': 'learn'}" in text
    assert "from gpuload.integrations.trl import SFTTrainer" in text
    text = lines(file, tokenizer, "verl", missing_reasoning="learn", thinking=("<think>\n", "</think>"))
    assert "data.custom_cls.name=ServedSFTDataset" in text
    assert "\n+data.gpuload.missing_reasoning=learn\n" in text
    assert '# in a configuration file: data: {gpuload: {thinking: ["<think>\\n", "</think>"]}}' in text
    for trainer in ("slime", "nemo-rl"):
        assert lines(file, tokenizer, trainer).startswith("# gpuload has no rows as served for")


def test_what_is_prepared_for_trl(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL has no setting for arguments of the template: the command writes the rows that were checked."""
    tokenizer = str(tmp_path / "tokenizer")
    small_tokenizer(STRIPPING).save_pretrained(tokenizer)
    monkeypatch.chdir(tmp_path)
    options = {"missing_reasoning": "learn", "apply_chat_template_kwargs": {"x": 1}}
    command = re.search(r"# gpuload (prepare .*)", lines(file, tokenizer, "trl", **options))
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    expected = gpuload.load_chats(file, tokenizer, turns="served", **options)
    made = datasets.load_from_disk("sft")["train"]
    assert made["input_ids"][:] == [row["input_ids"] for row in expected[:]]


# -- inspect --------------------------------------------------------------------------------------------------------


def test_statistics() -> None:
    """Lengths, loss and roles are those of rows as served."""
    job = open_data(pa.table({"messages": as_json(chats())}), small_tokenizer(STRIPPING), turns="served")
    dataset = run(job)
    made = statistics_of(job, dataset, with_samples=True)
    rows = _loaded(chats())[:]
    assert made.groups[0].lengths.tolist() == sorted(len(row["input_ids"]) for row in rows)
    assert made.groups[0].loss == sum(label != -100 for row in rows for label in row["labels"])
    assert made.rows_without_roles == 0
    assert sum(each.tokens for each in made.roles) == made.groups[0].lengths.sum()
    assert {each.role for each in made.roles} == {"template", "user", "assistant"}
    assert f"mean {made.groups[0].lengths.mean():,.0f}" in str(dataset.report)
    assert len(made.samples) == len(rows)
    assert page_of(made, "small").startswith("<!doctype html>")


def test_commands(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_tokenizer(STRIPPING).save_pretrained(tmp_path / "tokenizer")
    own = [file, "--tokenizer", str(tmp_path / "tokenizer")]
    page = tmp_path / "page.html"
    assert main(["inspect", *own, "--turns", "served", "--html", str(page)]) == 0
    assert "7 rows as served" in capsys.readouterr().out
    assert page.exists()
    arguments = ["--turns", "served", "--missing-reasoning", "learn", "--html", str(page)]
    assert main(["check", *own, *arguments]) == 0
    assert "inserted text learned: 1 row" in capsys.readouterr().out
    assert main(["check", *own, "--missing-reasoning", "learn"]) != 0
    assert "--missing-reasoning learn is for --turns served" in capsys.readouterr().err
    assert main(["inspect", *own, "--turns", "servd"]) != 0
    assert "--turns servd: expected one of 'conversation', 'served'" in capsys.readouterr().err


def test_other_data() -> None:
    table = pa.table({"prompt": ["a", "b"]})
    with pytest.raises(OptionError, match="is for conversations, and these files hold prompts"):
        gpuload.check(table, small_tokenizer(STRIPPING), turns="served")


@pytest.mark.parametrize(
    "given", [["--history", "sampled"], ["--thinking", "<a>", "b c"], ["--thinking", "[a, b]", "[/b]"]]
)
def test_arguments_of_conversations_for_prompts(
    tmp_path: Path, qwen_folder: str, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["inspect", str(tmp_path / "rows.jsonl"), "--tokenizer", qwen_folder, *given]) == 1
    assert f"{shlex.join(given)} is for conversations, and these files hold prompts" in capsys.readouterr().err
