"""The lines that configure a trainer for checked data."""

import json
from collections.abc import Sequence

import numpy as np

from gpuload.inspect.checks.run import Checked, CheckedTrainer

_STEP = 64  # suggested limits are multiples of it
_FAR = 2  # a longest row of so many times the 99th percentile is not what a limit is for


def suggested_limit(found: Checked) -> int:
    """A limit in tokens that keeps all rows, or 99 % of them if the longest is far longer."""
    if not len(found.lengths):
        return _STEP
    most, longest = int(np.percentile(found.lengths, 99, method="higher")), int(found.lengths[-1])
    return -(-(longest if longest <= _FAR * most else most) // _STEP) * _STEP


def kept_by(found: Checked, limit: int) -> str:
    """Which rows a limit keeps."""
    over = len(found.lengths) - int(np.searchsorted(found.lengths, limit, side="right"))
    return f"a limit of {limit:,} tokens {f'drops {over:,} row' + 's' * (over > 1) if over else 'keeps all rows'}"


def lines_for(found: Checked, trainer: CheckedTrainer | None, limit: int | None) -> list[str]:
    """The lines to paste.

    Args:
        trainer: None for Python.
        limit: the most tokens of a row; None for a suggested limit.
    """
    limit = limit or suggested_limit(found)
    make = {None: _python, "verl": _verl, "trl": _trl, "slime": _slime, "nemo-rl": _nemo_rl}[trainer]
    return make(found, limit)


def _python(found: Checked, limit: int) -> list[str]:
    load, name = {
        "prompts": ("load", "max_prompt_length"),
        "chats": ("load_chats", "max_length"),
        "pairs": ("load_pairs", "max_length"),
    }[found.kind]
    more = {"prompts": ["prompt_key", found.prompt_key], "chats": ["loss_on", found.loss_on or ""]}.get(found.kind)
    option = "" if more is None else f" {more[0]}={_text(more[1])},"
    return [
        "import gpuload",
        f"rows = gpuload.{load}(",
        f"    {_list(found.files)},",
        f"    {_text(found.tokenizer)},{option} {name}={limit},",
        ")",
    ]


def _verl(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# verl trains on prompts and on conversations, not on pairs"]
    files = f"data.train_files={_quoted('[' + ','.join(found.files) + ']')}"
    start = ["data.custom_cls.path=pkg://gpuload.integrations.verl"]
    if found.kind == "chats":
        key, name = ("messages_key", found.prompt_key), "SFTDataset"
        more = [f"data.max_length={limit}", "data.truncation=error"]
    else:
        key, name = ("prompt_key", found.prompt_key), "RLHFDataset"
        more = [f"data.max_prompt_length={limit}", "data.filter_overlong_prompts=true"]
    return [*start, f"data.custom_cls.name={name}", files, f"data.{key[0]}={key[1]}", *more]


def _trl(found: Checked, limit: int) -> list[str]:
    if found.kind == "prompts":
        return [
            "from gpuload.integrations.trl import prompts",
            f"train_dataset = prompts({_list(found.files)},",
            f"                        tokenizer, max_prompt_length={limit})",
        ]
    kind = "parquet" if all(name.endswith(".parquet") for name in found.files) else "json"
    rows = ["from datasets import load_dataset", f"train_dataset = load_dataset({_text(kind)}, split='train',"]
    rows.append(f"    data_files={_list(found.files)})")
    if found.kind == "pairs":
        return [
            "from trl import DPOConfig",
            "from gpuload.integrations.trl import DPOTrainer",
            *rows,
            f"args = DPOConfig(max_length={limit})",
        ]
    part = {"assistant": ", assistant_only_loss=True", "completion": ", completion_only_loss=True"}
    return [
        "from trl import SFTConfig",
        "from gpuload.integrations.trl import SFTTrainer",
        *rows,
        f"args = SFTConfig(max_length={limit}{part.get(found.loss_on or '', '')})",
    ]


def _slime(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# slime trains on prompts and on conversations, not on pairs"]
    rollout = ["--rollout-function-path gpuload.integrations.slime.sft_rollout"] * (found.kind == "chats")
    length = [f"--rollout-max-prompt-len {limit}"] * (found.kind == "prompts")
    return [
        "--data-source-path gpuload.integrations.slime.DataSource",
        *rollout,
        *(f"--prompt-data {_quoted(name)}" for name in found.files[:1]),
        f"--input-key {found.prompt_key}",
        *["--apply-chat-template"] * (found.kind == "prompts"),
        *length,
    ]


def _nemo_rl(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# gpuload has datasets of prompts and of conversations for NeMo-RL, not of pairs"]
    name = "ChatDataset" if found.kind == "chats" else "PromptDataset"
    key = "chat_key" if found.kind == "chats" else "input_key"
    more = [f"'+data.train.{each}=${{data.{each}}}'" for each in ("add_bos", "add_eos", "add_generation_prompt")]
    return [
        f"data.max_input_seq_length={limit}",
        f"data.train.dataset_name=gpuload.integrations.nemo_rl.{name}",
        f"+data.train.data_path={_quoted(found.files[0])}",
        f"+data.train.{key}={found.prompt_key}",
        "'+data.train.tokenizer=${policy.tokenizer}'",
        "'+data.train.max_input_seq_length=${data.max_input_seq_length}'",
        *more * (found.kind == "chats"),
    ]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(names: Sequence[str]) -> str:
    return _text(names[0]) if len(names) == 1 else "[" + ", ".join(map(_text, names)) + "]"


def _quoted(value: str) -> str:
    plain = all(character.isalnum() or character in "_-./+@:," for character in value)
    return value if plain else "'" + value.replace("'", "'\\''") + "'"
