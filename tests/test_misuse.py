"""Misuse of gpuload: each example in the folder `misuse` gives the error that it says.

An example is a few lines of Python, or a command line, and ends with a comment: the class of the error, or `exit` and
the status of the command, and its message, in which `...` stands for anything. They run in a directory with:

    prompts.parquet, chats.jsonl, pairs.jsonl, labels.jsonl    data as it should be, of each kind
    questions.jsonl                                            prompts in a column `question`
    broken.jsonl, lines.parquet, notes.txt                     files that cannot be read
    tokenizer, plain_tokenizer                                 with and without a chat template
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizer_cases import small_tokenizer

from gpuload.cli.main import main

FOLDER = Path(__file__).parent / "misuse"
EXAMPLES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".sh"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the files."""
    folder = tmp_path_factory.mktemp("misuse")
    asked = [{"role": "user", "content": "Who?"}]
    answer = {"role": "assistant", "content": "I."}
    rows: dict[str, list[dict[str, Any]]] = {
        "chats": [{"messages": [*asked, answer]}] * 4,
        "pairs": [{"prompt": asked, "chosen": [answer], "rejected": [{"role": "assistant", "content": "You."}]}] * 4,
        "labels": [{"messages": [*asked, answer], "label": good} for good in (True, False)],
        "questions": [{"question": "Who?"}] * 4,
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    pq.write_table(pa.table({"prompt": [asked] * 4}), folder / "prompts.parquet")
    shutil.copy(folder / "chats.jsonl", folder / "lines.parquet")
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    (folder / "notes.txt").write_text("notes")
    for name, template in (("tokenizer", TEMPLATE), ("plain_tokenizer", None)):
        small_tokenizer(template).save_pretrained(folder / name)  # type: ignore[arg-type]
    return folder


def expected(path: Path) -> tuple[str, str]:
    """The class of the error, or "exit" and a status; and a pattern for its message."""
    comments = re.search(r"((?:^#.*\n)+)\Z", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert comments, f"{path.name} ends with no comment"
    text = " ".join(line.removeprefix("#").strip() for line in comments[1].splitlines())
    kind, _, message = text.partition(": ")
    return kind, ".*".join(map(re.escape, message.split("...")))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    kind, message = expected(path)
    code = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        with pytest.raises(Exception) as caught:  # noqa: PT011
            exec(compile(code, path.name, "exec"), {})
        found = type(caught.value).__name__, " ".join(str(caught.value).split())
    else:
        (command,) = (line for line in code.splitlines() if line and not line.startswith("#"))
        try:
            status = main(shlex.split(command)[1:])
        except SystemExit as error:
            status = int(error.code or 0)
        last = capsys.readouterr().err.strip().splitlines()[-1]
        found = f"exit {status}", last
    assert found[0] == kind, found
    assert re.fullmatch(message, found[1]), found


def test_examples_are_short_and_many() -> None:
    assert len(EXAMPLES) > 30
    assert {path for path in FOLDER.iterdir() if path.is_file()} == set(EXAMPLES)
    assert all(len(path.read_text().splitlines()) <= 15 for path in EXAMPLES)
