"""The lines that configure a trainer for checked data."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.core.words import counted
from gpuload.inspect.checks.run import SIDES, Checked, CheckedTrainer
from gpuload.kinds.served.options import OF_SERVED

_STEP = 64  # suggested limits are multiples of it
_FAR = 2  # a longest row of so many times the 99th percentile is not what a limit is for

_TRL_READS = (None, "messages", "prompt-completion", "text", "preference", "implicit")
"""Formats that TRL's own trainers read."""


def suggested_limit(found: Checked, trainer: CheckedTrainer | None = None) -> int:
    """A limit in tokens that keeps all rows, or 99 % of them if the longest is far longer and the trainer drops it."""
    if not len(found.lengths):
        return _STEP
    most, longest = int(np.percentile(found.lengths, 99, method="higher")), int(found.lengths[-1])
    near = longest > _FAR * most and not (trainer == "verl" and found.kind == "chats")  # which raises an error for it
    return -(-(most if near else longest) // _STEP) * _STEP


def kept_by(found: Checked, trainer: CheckedTrainer | None, limit: int | None) -> str:
    """Which rows a limit keeps; see `lines_for`."""
    if found.images and limit is None:
        return "no limit is suggested, because tokens of images are not counted, so there is nothing to paste"
    limit = limit or suggested_limit(found, trainer)
    if not len(found.lengths):
        return "no row can be loaded, so there is nothing to paste"
    over = _over(found, limit)
    if trainer == "slime" and found.kind == "chats":
        return f"slime has no limit for conversations, and the longest has {counted(int(found.lengths[-1]), 'tokens')}"
    if over == len(found.lengths) and not _cuts(found, trainer):
        return f"a limit of {counted(limit, 'tokens')} drops all rows, so there is nothing to paste"
    does = f"{'cuts' if _cuts(found, trainer) else 'drops'} {counted(over, 'rows')}" if over else "keeps all rows"
    return f"a limit of {counted(limit, 'tokens')} {does}"


def _over(found: Checked, limit: int) -> int:
    return len(found.lengths) - int(np.searchsorted(found.lengths, limit, side="right"))


def _cuts(found: Checked, trainer: CheckedTrainer | None) -> bool:
    """Whether longer rows are cut instead of dropped."""
    if found.kind == "prompts":
        return found.overlong != "drop" and trainer in (None, "verl")
    if trainer == "trl":
        return bool(_as_served(found)) or found.overlong != "drop" or not _is_prepared(found)
    return (found.overlong != "drop" and trainer is None) or trainer == "verl"


def lines_for(found: Checked, trainer: CheckedTrainer | None, limit: int | None) -> list[str]:
    """The lines to paste, for a trainer or, if None, for Python; none if all rows are dropped. Without a limit in
    tokens, one is suggested."""
    if found.images and limit is None:
        return []
    limit = limit or suggested_limit(found, trainer)
    endless = trainer == "slime" and found.kind == "chats"
    if _over(found, limit) == len(found.lengths) and not (len(found.lengths) and (endless or _cuts(found, trainer))):
        return []
    make = {None: _python, "verl": _verl, "trl": _trl, "slime": _slime, "nemo-rl": _nemo_rl}[trainer]
    return [*[_UNWEIGHTED] * (found.weighted and trainer is not None), *make(found, limit)]


_UNWEIGHTED = "# the trainer does not read weights of answers: without a loss function of your own, all count alike"


def _python(found: Checked, limit: int) -> list[str]:
    load, name = {
        "prompts": ("load", "max_prompt_length"),
        "chats": ("load_chats", "max_length"),
        "pairs": ("load_pairs", "max_length"),
    }[found.kind]
    options: dict[str, Any] = {"prompt_key": found.prompt_key} if found.kind == "prompts" else {}
    options |= {"loss_on": found.loss_on} if found.kind == "chats" else {}
    options |= {**found.options, name: limit}
    if found.overlong != "drop":
        cut = {"filter_overlong_prompts": False, "truncation": SIDES[found.overlong]}
        options |= cut if found.kind == "prompts" else {"overlong": found.overlong}
    bad = any(each.check == "KTO labels" for each in found.findings)
    return [
        *['# this learns bad answers as good ones; load_pairs(..., objective="kto") does not'] * bad,
        "import gpuload",
        f"rows = gpuload.{load}(",
        f"    {_list(found.files)},",
        f"    {_text(found.tokenizer)}, {_keywords(options)},",
        ")",
    ]


def _verl(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# verl trains on prompts and on conversations, not on pairs"]
    if unread := _unread(found, "verl"):
        return unread
    files = f"data.train_files={_quoted('[' + ','.join(found.files) + ']')}"
    start = [*_left_out(found), "data.custom_cls.path=pkg://gpuload.integrations.verl"]
    cut = SIDES.get(found.overlong, "right")
    if found.kind == "chats":
        served = _as_served(found)
        key, name = "messages_key", "ServedSFTDataset" if served else "SFTDataset"
        over = _over(found, limit)
        more = [f"data.max_length={limit}", f"data.truncation={cut if over else 'error'}"]
        more += [_of_verl(option, value) for option, value in served.items() if option != "turns"]
        more += ["data.pad_mode=right"] * (over > 0 and cut == "left")  # without padding, verl cuts ends only
    else:
        key, name = "prompt_key", "RLHFDataset"
        drops = found.overlong == "drop"
        more = [f"data.max_prompt_length={limit}", f"data.filter_overlong_prompts={str(drops).lower()}"]
        more += [f"data.truncation={cut}"] * (not drops)
    return [*start, f"data.custom_cls.name={name}", files, f"data.{key}={found.prompt_key}", *more]


def _as_served(found: Checked) -> dict[str, Any]:
    """The options of rows as served, with what is learned; none for rows that are conversations."""
    if found.options.get("turns") != "served":
        return {}
    names = (*OF_SERVED, "loss_on", "drop_nulls")
    return {name: found.options[name] for name in names if name in found.options}


def _of_verl(option: str, value: Any) -> str:
    if option == "thinking":  # a line break cannot be written there
        return f"# in a configuration file: data: {{gpuload: {{thinking: {json.dumps(list(value))}}}}}"
    return f"+data.gpuload.{option}={_quoted(str(value))}"


def _is_prepared(found: Checked) -> bool:
    """Whether TRL reads tokens that gpuload has written, because it has no settings for the data or the loss."""
    if _as_served(found):  # by `dataset_kwargs`
        return bool(_changes(found).keys() - {"drop_nulls"})
    loss = found.loss_on or ""
    kept = {"messages": ("assistant", "all"), "prompt-completion": ("completion", "all"), "text": ("all",)}
    known = found.kind != "chats" or loss in kept.get(found.format or "messages", ())
    return found.format not in _TRL_READS or not known or bool(_changes(found)) or found.overlong != "drop"


def _changes(found: Checked) -> dict[str, Any]:
    """The options given that change what is made of a row."""
    names = ("drop_nulls", "normalize_messages", "chat_template", "apply_chat_template_kwargs")
    return {name: found.options[name] for name in names if name in found.options}


def _trl(found: Checked, limit: int) -> list[str]:
    if found.kind == "prompts":
        if "chat_template" in found.options and found.options["chat_template"] is None:
            return ["# TRL renders and encodes prompts that are texts itself; gpuload has prompts of messages for it"]
        options = {"max_prompt_length": limit, **found.options}
        return [
            "from gpuload.integrations.trl import prompts",
            f"train_dataset = prompts({_list(found.files)},",
            f"                        {_text(found.tokenizer)}, {_keywords(options)})",
        ]
    if _is_prepared(found):
        return _trl_prepared(found, limit)
    kind = "parquet" if all(name.endswith(".parquet") for name in found.files) else "json"
    data = ["from datasets import load_dataset", f"train_dataset = load_dataset({_text(kind)}, split='train',"]
    data.append(f"    data_files={_list(found.files)})")
    if found.kind == "pairs":
        return [
            "from trl import DPOConfig",
            "from gpuload.integrations.trl import DPOTrainer",
            *data,
            f"args = DPOConfig(max_length={limit})",
        ]
    settings: dict[str, Any] = {"max_length": limit}
    if served := _as_served(found):
        settings["dataset_kwargs"] = served
    elif found.loss_on in ("assistant", "completion"):
        settings[f"{found.loss_on}_only_loss"] = True
    elif found.format == "prompt-completion":
        settings["completion_only_loss"] = False
    if "messages_key" in found.options and found.format == "text":
        settings["dataset_text_field"] = found.prompt_key
    elif "messages_key" in found.options and found.prompt_key != "messages":
        data[-1] += ".remove_columns('messages')" * found.other_messages
        data[-1] += f".rename_column({_text(found.prompt_key)}, 'messages')"
    return [
        "from trl import SFTConfig",
        "from gpuload.integrations.trl import SFTTrainer",
        *data,
        f"args = SFTConfig({_keywords(settings)})",
    ]


def _trl_prepared(found: Checked, limit: int) -> list[str]:
    sft = found.kind == "chats"
    options = {"loss_on": found.loss_on} | dict(found.options) if sft else dict(found.options)
    directory, trainer = ("sft", "SFT") if sft else ("dpo", "DPO")
    data = ["from datasets import load_from_disk", f"train_dataset = load_from_disk({_text(directory)})['train']"]
    own = [
        "class PreparedDPOTrainer(DPOTrainer):",
        "    def _prepare_dataset(self, dataset, *_):",
        "        return dataset",
    ]
    return [
        "# TRL has no settings for such rows: write them as tokens first, by this command",
        f"# {_export(found, options, limit, directory)}",
        f"from trl import {trainer}Config, {trainer}Trainer",
        *data,
        *own * (not sft),
        f"args = {trainer}Config(max_length={limit})",
    ]


def _export(found: Checked, options: Mapping[str, Any], limit: int, kind: str) -> str:
    """The command that writes tokens to a directory of the name of what they are for."""
    words = ["gpuload", "prepare", *found.files, "--tokenizer", found.tokenizer]
    for name in ("format", "messages_key", "loss_on", "normalize_messages", "chat_template"):
        if name in options:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    words += ["--drop-nulls"] * ("drop_nulls" in options)
    if "apply_chat_template_kwargs" in options:
        words += ["--template-kwargs", json.dumps(dict(options["apply_chat_template_kwargs"]))]
    for name in OF_SERVED:
        value = options.get(name)
        words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else value)] if value else []
    words += ["--overlong", found.overlong] * (found.overlong != "drop")
    return shlex.join([*words, "--max-length", str(limit), "--export", kind, kind])


def _slime(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# slime trains on prompts and on conversations, not on pairs"]
    if unread := _unread(found, "slime") or _unserved(found, "slime"):
        return unread
    sft, prompts = found.kind == "chats", found.kind == "prompts"
    rendered = prompts and found.options.get("chat_template", "default") is not None
    return [
        *_left_out(found),
        *_one_file(found, "slime"),
        "--data-source-path gpuload.integrations.slime.DataSource",
        *["--rollout-function-path gpuload.integrations.slime.sft_rollout"] * sft,
        f"--prompt-data {_quoted(_file(found))}",
        f"--input-key {_quoted(found.prompt_key)}",
        *["--tool-key tools"] * (sft and found.tools),
        *["--apply-chat-template"] * rendered,
        *[f"--rollout-max-prompt-len {limit}"] * prompts,
    ]


def _nemo_rl(found: Checked, limit: int) -> list[str]:
    if found.kind == "pairs":
        return ["# gpuload has datasets of prompts and of conversations for NeMo-RL, not of pairs"]
    if unread := _unread(found, "NeMo-RL") or _unserved(found, "NeMo-RL"):
        return unread
    name = "ChatDataset" if found.kind == "chats" else "PromptDataset"
    key = "chat_key" if found.kind == "chats" else "input_key"
    more = [f"'+data.train.{each}=${{data.{each}}}'" for each in ("add_bos", "add_eos", "add_generation_prompt")]
    longest = int(found.lengths[found.lengths <= limit][-1])
    return [
        *_left_out(found),
        *_one_file(found, "NeMo-RL"),
        f"data.max_input_seq_length={max(limit, longest + 1)}",  # NeMo-RL drops rows of as many tokens, too
        f"data.train.dataset_name=gpuload.integrations.nemo_rl.{name}",
        f"+data.train.data_path={_quoted(_file(found))}",
        f"+data.train.{key}={_quoted(found.prompt_key)}",
        "'+data.train.tokenizer=${policy.tokenizer}'",
        "'+data.train.max_input_seq_length=${data.max_input_seq_length}'",
        *more * (found.kind == "chats"),
    ]


def _unread(found: Checked, trainer: str) -> list[str]:
    """What is said of conversations in a format that a trainer does not read."""
    if found.kind != "chats" or found.format in (None, "messages"):
        return []
    return [
        f"# {trainer} reads conversations as messages with role and content, not in the format {found.format}:",
        "# convert the rows, or train on tokens: gpuload prepare --export writes them for other trainers",
    ]


def _unserved(found: Checked, trainer: str) -> list[str]:
    return [f"# gpuload has no rows as served for {trainer} yet, but for verl and TRL"] * bool(_as_served(found))


def _left_out(found: Checked) -> list[str]:
    """A remark on options that the lines do not have."""
    given = {name: value for name, value in _changes(found).items() if name not in _as_served(found)}
    return [f"# the rows were checked with {_keywords(given)}, which these lines do not set"] * bool(given)


def _one_file(found: Checked, trainer: str) -> list[str]:
    some = f"# {trainer} reads one file: write the rows of all {len(found.files)} to {_file(found)} first"
    return [some] * (len(found.files) > 1)


def _file(found: Checked) -> str:
    if len(found.files) == 1:
        return found.files[0]
    return "all.parquet" if all(name.endswith(".parquet") for name in found.files) else "all.jsonl"


def _keywords(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in options.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping | tuple | list):
        return repr(dict(value) if isinstance(value, Mapping) else tuple(value))
    return repr(value) if value is None or isinstance(value, bool | int | float) else _text(str(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(names: Sequence[str]) -> str:
    return _text(names[0]) if len(names) == 1 else "[" + ", ".join(map(_text, names)) + "]"


def _quoted(value: str) -> str:
    plain = all(character.isalnum() or character in "_-./+@:," for character in value)
    return value if plain else "'" + value.replace("'", "'\\''") + "'"
