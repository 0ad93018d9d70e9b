"""The arguments that several commands have, and those of `gpuload check` and `gpuload diff`."""

import argparse
import json
from typing import Any

from gpuload.core.errors import OptionError
from gpuload.kinds.served.options import OF_SERVED

TRAINING = ("format", "loss_on", "messages_key", "drop_nulls", "normalize_messages")


def add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", help="paths, globs, directories or URLs of parquet, json or jsonl files")


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds what is said of the data, see `data_of`."""
    parser.add_argument(
        "--as",
        dest="kind",
        choices=["prompts", "chats", "pairs"],
        help="what the files hold: prompts, chats for SFT, or preference data (default: found by the columns)",
    )
    parser.add_argument("--prompt-key", default="prompt", metavar="KEY", help="column with the prompts (prompt)")
    parser.add_argument(
        "--no-template", action="store_true", help="prompts are plain strings, tokenized without a chat template"
    )
    parser.add_argument(
        "--chat-template",
        type=not_empty,
        metavar="FILE",
        help="instead of the tokenizer's own, a .jinja file or a name",
    )
    parser.add_argument("--messages-key", metavar="KEY", help="column with messages or texts, if it has another name")


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", metavar="NAME", help="of chats or pairs, as load_chats and load_pairs have it")
    parser.add_argument("--loss-on", metavar="PART", help="of chats: assistant, last, marked, completion or all")
    parser.add_argument("--drop-nulls", action="store_true", help="of chats and pairs: remove keys that are null")
    parser.add_argument(
        "--normalize-messages",
        metavar="MODE",
        help="of chats and pairs: auto makes contents that are null, and arguments of tool calls that are text, what "
        "most templates take",
    )
    parser.add_argument("--template-kwargs", metavar="JSON", default="{}", help="constants for the chat template")


def add_rows(parser: argparse.ArgumentParser) -> None:
    add_files(parser)
    parser.add_argument("--tokenizer", required=True, help="path or hub id")
    add_data(parser)
    add_training(parser)


def data_of(given: argparse.Namespace) -> dict[str, Any]:
    """What is said of the data, as for `open_data`."""
    names = ("kind", "prompt_key", "messages_key")
    return {name: getattr(given, name) for name in names} | {"chat_template": template_of(given)}


def rows_of(given: argparse.Namespace) -> dict[str, Any]:
    """What is said of data to train on, as for `open_data`."""
    more = {"apply_chat_template_kwargs": template_kwargs(given.template_kwargs)}
    return {name: getattr(given, name) for name in TRAINING} | data_of(given) | more


def template_kwargs(text: str, argument: str = "--template-kwargs") -> Any:
    """`apply_chat_template_kwargs` as JSON, given as an argument. An `OptionError` if it is no JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{argument} {text!r}: not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise OptionError(f'{argument} {text!r}: expected a JSON object, such as {{"enable_thinking": false}}')
    return given


def not_empty(text: str) -> str:
    """The value of an argument, which is not empty, as it is where a variable of the shell is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a value, and it is empty")
    return text


def template_of(given: argparse.Namespace) -> str | None:
    """The option `chat_template`."""
    if given.no_template and given.chat_template:
        given.parser.error("--no-template and --chat-template exclude each other")
    return None if given.no_template else given.chat_template or "default"


def add_served(parser: Any) -> None:
    """Adds the options of rows as served."""
    parser.add_argument(
        "--turns", metavar="MODE", help="of chats: served makes rows in which each answer is as inference sees it"
    )
    more = parser.add_argument_group("arguments of --turns served") if hasattr(parser, "prog") else parser
    more.add_argument("--missing-reasoning", metavar="MODE", help="answers without reasoning: prompt, learn or skip")
    more.add_argument("--serving-template", metavar="FILE", help="the template of inference, if it is another one")
    more.add_argument("--thinking", nargs=2, metavar=("OPEN", "CLOSE"), help="the texts around reasoning")
    more.add_argument("--history", metavar="MODE", help="earlier answers with token_ids: rendered or sampled")


def served_of(given: argparse.Namespace) -> dict[str, Any]:
    """The options of rows as served that were given, as for `open_data`."""
    found = {name: getattr(given, name, None) for name in OF_SERVED}
    return {name: value for name, value in found.items() if value is not None}


def add_commands(commands: Any) -> None:
    """Adds both commands to those of the parser."""
    check = commands.add_parser("check", help="look for what would spoil a training run; exit status 1 on errors")
    add_rows(check)
    add_served(check)
    check.add_argument(
        "--for",
        dest="trainer",
        choices=["verl", "trl", "slime", "nemo-rl"],
        help="print the configuration of this trainer (default: of gpuload in Python)",
    )
    check.add_argument(
        "--against", nargs="+", metavar="FILE", help="files that must not have the same prompts, such as training data"
    )
    check.add_argument("--limit", type=int, metavar="N", help="the most tokens of a row (default: no limit)")
    check.add_argument(
        "--overlong", default="drop", choices=["drop", "keep_start", "keep_end"], help="what becomes of longer rows"
    )
    check.add_argument("--json", dest="as_json", action="store_true", help="print the findings as JSON")
    check.add_argument("--html", type=not_empty, metavar="FILE", help="also write an HTML page")
    check.set_defaults(parser=check)

    diff = commands.add_parser(
        "diff", help="compare what two tokenizers or templates make of the same rows; exit status 1 if rows change"
    )
    add_rows(diff)
    diff.add_argument("--against-tokenizer", metavar="NAME", help="the other one (default: the same)")
    diff.add_argument(
        "--against-template", metavar="FILE", help="the other template, a .jinja file or a name (default: the same)"
    )
    diff.add_argument(
        "--against-template-kwargs", metavar="JSON", help="constants for the other template (default: the same)"
    )
    diff.add_argument("--rows", type=int, default=5, metavar="N", help="changed rows that are shown (5)")
    diff.add_argument("--json", dest="as_json", action="store_true", help="print counts and numbers of rows as JSON")
    diff.set_defaults(parser=diff)
