"""The command line, as a person would call it."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from transformers import AutoTokenizer

import gpuload
from gpuload.cli import doctor
from gpuload.cli.inspect import check_page, write_page
from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.engines.device import cuda
from gpuload.engines.host.engine import HostEngine


def test_inspect(
    gsm8k: str, qwen: Any, qwen_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "1000")
    page = tmp_path / "page.html"
    assert main(["inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "500", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    lengths = np.sort(gpuload.load(gsm8k, qwen, max_samples=500).tokens.lengths)
    assert "500 rows read, 500 kept" in shown
    assert re.search(r"extra_info +struct<answer: string", shown)
    everything = next(line for line in shown.splitlines() if line.startswith("  all "))
    numbers = [int(word.replace(",", "")) for word in everything.split()[1:]]
    assert numbers == [500, *np.percentile(lengths, (0, 5, 25, 50, 75, 95, 99, 100), method="nearest").tolist()]
    assert re.search(r"openai/gsm8k +500", shown)
    histogram = re.findall(r"^ +[\d,]+ - +[\d,]+ +([\d,]+) #*$", shown, re.MULTILINE)
    assert sum(int(count.replace(",", "")) for count in histogram) == 500
    stays = shown[shown.index("rows kept with") :].splitlines()
    limits, shares = stays[1].split(), stays[2].split()[2:]
    for limit, share in zip(limits, shares, strict=True):
        assert share == f"{100 * (lengths <= int(limit)).mean():.1f}%"
    assert "500 rows read" in page.read_text()


def test_a_closed_pipe_ends_a_command_quietly(gsm8k: str, qwen_folder: str) -> None:
    command = [sys.executable, "-m", "gpuload", "inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head -0` does
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        (">&-", ("", "", 0)),  # as some daemons start programs
        (">/dev/full", ("", "gpuload: show: [Errno 28] No space left on device\n", 1)),
        ("2>&- --row 99999", ("", "", 1)),  # messages are not for standard output
    ],
)
def test_output_that_cannot_be_written(redirection: str, expected: tuple[str, str, int], gsm8k: str) -> None:
    command = f'"{sys.executable}" -m gpuload show "{gsm8k}" --row 0 {redirection}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == expected


def test_a_locale_that_lacks_characters(gsm8k: str, qwen_folder: str) -> None:
    command = [sys.executable, "-m", "gpuload", "show", gsm8k, "--row", "0", "--tokenizer", qwen_folder]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u23ce" in done.stdout  # the sign for the end of a line


def test_inspect_names_what_is_wrong(
    write: Callable[..., str], qwen_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["inspect", str(tmp_path / "none*.parquet"), "--tokenizer", qwen_folder]) == 1
    assert re.fullmatch(r"gpuload: .*none\*.parquet: no file matches.*\n", capsys.readouterr().err)
    assert main(["inspect", write({"q": ["a"]}), "--tokenizer", qwen_folder]) == 1
    assert "no column 'prompt'" in capsys.readouterr().err
    assert (
        main(["inspect", write({"q": ["a", "b c"]}), "--tokenizer", qwen_folder, "--prompt-key", "q", "--no-template"])
        == 0
    )
    assert "p100" in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for package in ("torch", "transformers", "gigatoken", "pyarrow"):
        assert re.search(rf"  {package} +\d", shown)
    stages = "".join(rf"    {stage} +\d+\.\d+ s\n" for stage in ("prepare", "read", "render", "encode", "batch"))
    assert re.search(rf"  cpu +works\n{stages}    uses +cpu: chat template compiled, encoded by gigatoken", shown)
    assert re.search(rf"  cuda +(works\n{stages}|not available: .*(CUDA|GPU|installed))", shown)
    assert re.search(r"  CUDA +torch is built (for \d|without CUDA)", shown)


def test_doctor_requires(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is that of the required engine, and the other one is left alone."""
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device: f"no {device} today")
    assert main(["doctor", "--require", "cuda"]) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("\n  cuda          not available: no cuda today\n")
    assert "  cpu " not in shown
    assert main(["doctor", "--require", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "  cpu           works\n" in shown
    assert "  cuda " not in shown
    with pytest.raises(SystemExit):
        main(["doctor", "--require", "tpu"])
    assert "choose from" in capsys.readouterr().err


def test_doctor_tells_the_stage_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: HostEngine, prompts: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(HostEngine, "render", render)
    assert main(["doctor", "--require", "cpu"]) == 1
    assert re.search(
        r"  cpu +DOES NOT WORK\n    prepare .*\n    read .*\n    render +FAILED: MemoryError\n    uses ",
        capsys.readouterr().out,
    )


def test_doctor_tries_out_the_gpu_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is the host's here: what is built is what is tried out."""
    built: list[str] = []
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(
        cuda, "cuda_engine", lambda reference, device="cuda": (built.append(device), HostEngine(reference))[1]
    )
    assert main(["doctor", "--require", "cuda"]) == 0
    assert built == ["cuda"]
    assert re.search(r"  cuda +works\n    prepare +\d", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["cache", "doctor --quick"])
def test_what_needs_no_tokenizer_is_imported_quickly(command: str) -> None:
    code = (
        "import sys; from gpuload.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert ("packages" in done.stdout) == command.startswith("doctor")
    assert "engines" not in done.stdout


def test_doctor_does_not_test_and_require_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for further in (["--require", "cpu"], ["--gpu"]):
        with pytest.raises(SystemExit):
            main(["doctor", "--quick", *further])
        assert "--quick tests nothing: use it alone" in capsys.readouterr().err


def test_doctor_without_a_gpu_starts_no_cuda() -> None:
    code = (
        "import sys, torch; from gpuload.cli.main import main; assert main(['doctor']) == 0;"
        "print(torch.cuda.is_initialized(), [m for m in ('cudf', 'pylibcudf', 'cupy', 'rmm') if m in sys.modules])"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False []"


def test_doctor_tells_gpu_and_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        (): "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |",
        ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"): (
            "NVIDIA A, 100 MiB, 580.95.05\nNVIDIA B, 200 MiB, 580.95.05\n"
        ),
    }
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *arguments: told[arguments])
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"  GPU 0 +NVIDIA A, 100 MiB\n  GPU 1 +NVIDIA B, 200 MiB\n", shown)
    assert re.search(r"  driver +580\.95\.05, supports CUDA up to 13\.0\n", shown)


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.cache.store.LEAST_BYTES", 4 << 20)  # as it is for users (conftest.py)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "8,792 rows read, 8,792 kept" in shown
    steps = re.findall(r"^  (first start|second start|an epoch)\b.* \d+\.\d\d +\d+\.\d\d$", shown, re.MULTILINE)
    assert steps == ["first start", "second start", "an epoch"]
    assert "  8,792 rows compared, 0 tokens differ\n" in shown
    assert "times" not in shown  # numbers next to each other; a reader sees where gpuload is slower
    assert shown.endswith("  gpuload inspect YOUR.parquet --tokenizer YOUR/TOKENIZER\n")
    assert re.search(r"input_ids +int64 +\(256, 512\)", shown)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["frobnicate"], ["inspect"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gpuload {gpuload.__version__}\n"


def test_progress(gsm8k: str, qwen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar where one is asked for (or on a terminal), and nothing where output goes elsewhere."""
    gpuload.load(gsm8k, qwen, max_samples=50)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
    gpuload.load(gsm8k, qwen, max_samples=50, progress=True)
    assert "prompts" in capsys.readouterr().err


def test_inspect_template(gsm8k: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--template", "--tokenizer", qwen_folder]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^system, user\n  '<\|im_start\|>system\\n' \+ \[message 0 content\] \+ ", shown, re.MULTILINE)
    assert main(["inspect", "--template", "--tokenizer", qwen_folder, gsm8k]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("user\n  '<|im_start|>system\\nYou are Qwen")
    assert "8,792 rows compiled, 0 rendered by transformers, 0 rejected" in shown
    with pytest.raises(SystemExit):
        main(["inspect", "--tokenizer", qwen_folder])
    assert "no files given" in capsys.readouterr().err


ESCAPES = "\033]0;title\a\033[2J\x9b31m"


def test_names_do_not_control_the_terminal(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], warm_cache: Path
) -> None:
    file = tmp_path / f"rows{ESCAPES}.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two"], f"n{ESCAPES}": [1, 2], "raw_prompt_ids": [1, 2]}), file)
    for command in (
        ["show", str(file), "--row", "0"],
        ["show", str(file), "--row", "0", "--tokenizer", qwen_folder],
        ["inspect", str(file), "--tokenizer", qwen_folder],
        ["inspect", str(file), "--tokenizer", qwen_folder, "--prompt-key", f"a{ESCAPES}"],
        ["prepare", str(file), "--tokenizer", qwen_folder],
        ["cache"],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main(command)
        captured = capsys.readouterr()
        assert re.findall(r"[^\n\x20-\x7e\xa1-\uffff]", captured.out + captured.err) == []
        assert "rows⟨U+001B⟩]0;title⟨U+0007⟩⟨U+001B⟩[2J⟨U+009B⟩31m.parquet" in captured.out + captured.err


def test_warnings_do_not_control_the_terminal(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than a fifth of the rows are dropped, and the reason has a field's name."""
    file = tmp_path / f"rows{ESCAPES}.json"
    parts = [{"type": "text", f"value{ESCAPES}": "a"}]
    rows: list[Any] = [{"prompt": [{"role": "user", "content": content}]} for content in ("one", parts)]
    file.write_text(json.dumps(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning
        warnings.showwarning = lambda *given: print(warnings.formatwarning(*given[:4]), file=sys.stderr)
        try:
            assert main(["prepare", str(file), "--tokenizer", qwen_folder]) == 0
        finally:
            warnings.showwarning = shown
    captured = capsys.readouterr()
    assert "gpuload: 1 of 2 rows were dropped" in captured.err
    assert "value⟨U+001B⟩]0;title⟨U+0007⟩" in captured.err
    assert re.findall(r"[^\n\x20-\x7e\xa1-\uffff]", captured.out + captured.err) == []


def test_messages_name_arguments(
    write: Callable[..., str], qwen_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write({"question": ["a"], "answer": ["b"]}, "qa.parquet")
    table = {"messages": [[*user("a"), {"role": "assistant", "content": "b"}]] * 2, "label": [True, False]}
    labeled = write(table, "kto.parquet")
    tokenizer = ["--tokenizer", qwen_folder]
    for command, message in (
        (["prepare", questions, *tokenizer], "no column 'prompt': did you mean --prompt-key question?"),
        (["inspect", questions, "--as", "chats", *tokenizer], "rename the columns, or pass --messages-key"),
        (["prepare", labeled, *tokenizer], "use load_pairs, or pass --format messages to train on all answers"),
        (["show", questions, "--row", "0", "--prompt-key", "question", *tokenizer, "--chat-template", "x"],
         "pass one of 'default', the text of a template, or the path of a .jinja file"),
    ):  # fmt: skip
        assert main(command) == 1
        assert message in capsys.readouterr().err
    assert main(["inspect", labeled, *tokenizer]) == 0


def test_arguments_of_the_shell_in_messages(
    write: Callable[..., str], qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = write({"messages": [[*user("a"), {"role": "assistant", "content": "b"}]]}, "chats.parquet")
    command = [chats, "--tokenizer", qwen_folder]
    for argument in ("--chat-template", "--html"):  # of a variable that is not set
        with pytest.raises(SystemExit):
            main(["check", *command, argument, ""])
        assert f"argument {argument}: expected a value, and it is empty" in capsys.readouterr().err
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    assert main(["prepare", *command, "--export", "sft", str(tmp_path / "made")]) == 1
    assert "made exists and was not written by gpuload: choose another directory" in capsys.readouterr().err
    (tmp_path / "made" / "gpuload.json").touch()
    assert main(["prepare", *command, "--export", "sft", str(tmp_path / "made")]) == 1
    assert "choose another directory, or overwrite it (--overwrite)" in capsys.readouterr().err
    split = ["--export", "sft", str(tmp_path / "new"), "--split", f"a/b={chats}"]
    assert main(["prepare", "/nosuch.parquet", *command[1:], *split]) == 1  # before anything is read
    assert "split 'a/b': expected letters" in capsys.readouterr().err
    AutoTokenizer.from_pretrained(qwen_folder).save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert main(["diff", *command, "--against-tokenizer", str(tmp_path / "bare")]) == 1
    assert "pass the text of one as --against-template\n" in capsys.readouterr().err
    for name in ("add_generation_prompt", "continue_final_message"):
        assert main(["check", *command, "--template-kwargs", f'{{"{name}": true}}']) == 1
        assert f"apply_chat_template_kwargs.{name} is set by the loader" in capsys.readouterr().err


def test_prepare_finds_what_files_hold(
    write: Callable[..., str], qwen_folder: str, warm_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpaca = write({"instruction": ["a", "b"], "output": ["c", "d"]}, "alpaca.parquet")
    pairs = write({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, "pairs.parquet")
    for file, load in ((alpaca, gpuload.load_chats), (pairs, gpuload.load_pairs)):
        assert main(["prepare", file, "--tokenizer", qwen_folder]) == 0
        assert load(file, qwen_folder).report.from_cache == [file]
    assert "format: alpaca, loss on assistant" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["prepare", alpaca, "--tokenizer", qwen_folder, "--as", "chats", "--ray", "--cache-dir", "x"])


def test_a_chat_template_of_inspect_and_show(
    write: Callable[..., str], qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    command = ["--tokenizer", qwen_folder, "--chat-template", str(template)]
    assert main(["show", write([user("one")]), "--row", "0", *command]) == 0
    assert "[<][user][>]" in capsys.readouterr().out
    assert main(["inspect", write([user("one")]), *command]) == 0
    assert "tokens     4;" in capsys.readouterr().out
    assert main(["inspect", "--template", *command]) == 0
    assert "'<user>' + [message 0 content]" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_an_error_before_the_load(
    gsm8k: str, qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page, message in (
        (tmp_path / "none" / "x.html", "no such directory: "),
        (tmp_path, "a directory: name a file"),
    ):
        assert main(["inspect", "/nosuch.parquet", "--tokenizer", qwen_folder, "--html", str(page)]) == 1
        assert f"gpuload: --html {page}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_a_page_is_written_as_a_whole_or_not_at_all(tmp_path: Path, there: bool) -> None:
    place, link = tmp_path / "x.html", tmp_path / "link.html"
    if there:
        place.write_text("old")
    link.symlink_to(place)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a disk that is full after 1,000 bytes
    try:
        with pytest.raises(OptionError, match=r"x.html: cannot be written: File too large"):
            write_page(str(place), "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert {path.name for path in tmp_path.iterdir()} == {"link.html", *["x.html"] * there}
    assert not there or place.read_text() == "old"
    write_page(str(link), "new")
    assert link.is_symlink()
    assert place.read_text() == "new"


def test_a_page_may_be_a_pipe() -> None:
    ends = os.pipe()
    check_page(Path(f"/dev/fd/{ends[1]}"))
    write_page(f"/dev/fd/{ends[1]}", "page")
    assert os.read(ends[0], 10) == b"page"
    for end in ends:
        os.close(end)


INTERRUPTED = """
import os, signal, sys
from gpuload.cli.main import main
from gpuload.engines.host import engine

render = engine.render_column

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return render(*arguments)

engine.render_column = interrupted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["prepare", "inspect"])
def test_an_interrupted_command_says_so_in_one_line(command: str, gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", INTERRUPTED, command, gsm8k, "--tokenizer", qwen_folder]
    environment = os.environ | {"GPULOAD_CACHE": str(tmp_path)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("", f"gpuload: {command} was interrupted\n", 130)
