"""What the classes here use of verl that is private, which releases of it are known, and what differs between them.

The classes override methods of verl's classes, which change between releases. If one of these methods is not known, a
dataset is compared with verl's own, on rows of every shape; an agent loop, whose rows come from a rollout, is verl's.
"""

import inspect
import logging
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gpuload.integrations.comparison import comparable, compare, covering_rows
from gpuload.integrations.core import imported, release_of
from gpuload.integrations.known_code import Table, change, problem
from gpuload.integrations.processors import adds_special_tokens, processor_problem
from gpuload.sources.read import Source

logger = logging.getLogger("gpuload.integrations.verl")

KNOWN: Table = {
    "verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize": {
        "9973ce94d9890b5d": "0.7.1",
        "af10f50fcb543f31": "0.8.0",
        "ab6c60937a1ab068": "0.9.0, 0.9.1",
    },
    "verl.utils.dataset.rl_dataset:RLHFDataset.__getitem__": {
        "e3e33c3f006ee1e5": "0.7.1",
        "6a933499e70d03d7": "0.8.0",
        "a02768c109b541fb": "0.9.0, 0.9.1",
    },
    "verl.utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset._read_files_and_process": {
        "47d25f96aeaff8b7": "0.7.1",
        "438036192b7c45d9": "0.8.0, 0.9.0, 0.9.1",
    },
    "verl.utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset.__getitem__": {
        "4b6178c922b9a3d9": "0.7.1",
        "5d317057c603595a": "0.8.0, 0.9.0, 0.9.1",
    },
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase.apply_chat_template": {
        "916ca03e2cc1aa17": "0.7.1",
        "b24b47df7dd080fe": "0.8.0",
        "c07c4cb04751f296": "0.9.0",
    },
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase.ct_build_initial_tokens": {
        "607c6cb8bce8c671": "0.9.0",
        "f00561937fb6b43a": "0.9.1",
        "ac7e131c37cb0fe6": "commit 1dda039",
    },
    "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder.build_initial_tokens": {
        "16369e9891d77406": "0.9.0",
        "acc1bac059ff43bf": "0.9.1",
        "cd25f731f510a594": "commit 1dda039",
    },
}
"""`python -m gpuload.integrations.known_code verl` prints the digests of the installed verl."""

_RLHF = "verl.utils.dataset.rl_dataset"
_SFT = "verl.utils.dataset.multiturn_sft_dataset"

HOMES = {
    "RLHFDataset": (_RLHF, "RLHFDataset"),
    "SFTDataset": (_SFT, "MultiTurnSFTDataset"),
    "SingleTurnAgentLoop": ("verl.experimental.agent_loop.single_turn_agent_loop", "SingleTurnAgentLoop"),
    "ToolAgentLoop": ("verl.experimental.agent_loop.tool_agent_loop", "ToolAgentLoop"),
}
"""Class of this package → module and name of verl's."""

_GIVEN = ("tokenizer", "config", "processor", "max_samples")
_METHODS = {
    "RLHFDataset": {
        "__init__": ("self", "data_files", *_GIVEN),
        "_read_files_and_tokenize": ("self",),
        "__getitem__": ("self", "item"),
        "maybe_filter_out_long_prompts": ("self", "dataframe"),
    },
    "SFTDataset": {
        "__init__": ("self", "parquet_files", *_GIVEN),
        "_read_files_and_process": ("self",),
        "__getitem__": ("self", "item"),
    },
}
"""Class → method of verl's class → its parameters."""

_NAMES = {
    "SFTDataset": {"verl.utils.py_functional": ("convert_nested_value_to_list_recursive",)},
    "SingleTurnAgentLoop": (_LOOPS := {"verl.experimental.agent_loop.agent_loop": ("AgentLoopBase",)}),
    "ToolAgentLoop": _LOOPS,
}
"""Class → module → further names that are used of it."""


def contract_problem(name: str, kind: Any) -> str | None:
    """Why a class of verl cannot be replaced by the one with this name; None if it can."""
    methods = _METHODS.get(name, {}).items()
    expected = {f"{kind.__name__}.{method}": (getattr(kind, method, None), given) for method, given in methods}
    return problem(expected) or imported(_NAMES.get(name, {}))[1]


def stock_methods(stock: type) -> list[Any]:
    """The methods of a class of verl that are replaced."""
    return [getattr(stock, place.rpartition(".")[2]) for place in KNOWN if f":{stock.__name__}." in place]


def difference(
    own: type,
    stock: type,
    sources: Sequence[Source],  # the files that are loaded
    given: Sequence[Any],  # further arguments of both classes
    ignored: Collection[str] = (),  # keys of rows that differ on purpose
    special: str | None = None,  # why they are compared although the code is known
) -> str | None:
    """Why a class may have other rows than verl's; None if verl's code is known, or rows of every shape are equal."""
    changed = change(release_of("verl", "verl"), KNOWN, *stock_methods(stock)) or special
    if changed is None:
        return None
    compared = type(own.__name__, (own,), {"is_compared": True})
    try:
        numbers, table = covering_rows(lambda: (table for source in sources for table in source.batches()))
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "rows.parquet"))
            pq.write_table(table, file)
            found, expected = (_outcomes(kind([file], *given), ignored) for kind in (compared, stock))
    except Exception as error:  # whatever has changed, verl's own class does the work
        return f"{changed}: {type(error).__name__}: {error!s:.200}"
    count = len(numbers)
    return compare(
        [numbers], lambda _: found, lambda _: expected, changed,
        logger=logger, trainer="verl", rows=count, differs=f"{count} rows read by both differ",
    )  # fmt: skip


def _outcomes(dataset: Any, ignored: Collection[str]) -> list[Any]:
    """All rows; for one that raises an error, that it does, because messages may differ."""
    made: list[Any] = []
    for number in range(len(dataset)):
        try:
            row = dataset.__getitems__([number])[0] if hasattr(dataset, "__getitems__") else dataset[number]
            made.append({name: comparable(value) for name, value in row.items() if name not in ignored})
        except Exception:
            made.append("raises an error")
    return made


def system_and_generation_prompt(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of the default system prompt and of the generation prompt, as verl's SFT dataset computes them;
    verl 0.7 does not use its `apply_chat_template_kwargs` here."""
    try:
        from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation as extract
    except ImportError:  # before verl 0.9
        from verl.utils.chat_template import extract_system_prompt_and_generation as extract
    used = kwargs if len(inspect.signature(extract).parameters) > 1 else {}
    prompts: tuple[list[int], list[int]] = extract(tokenizer, **used)
    return prompts


def template_problem(tokenizer: Any, processor: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why messages cannot be rendered and encoded by columns as verl's SFT dataset does it, with its
    `apply_chat_template_kwargs` and a processor instead of the tokenizer, if there is one; None if they can."""
    for name, value in kwargs.items():
        if not isinstance(value, str | int | float | None):
            return f"apply_chat_template_kwargs.{name} is of type {type(value).__name__}"
    given = tokenizer
    content: Any = "x"
    if processor is not None:
        given, content = processor, [{"type": "text", "text": "x"}]
        if problem := processor_problem(processor):
            return problem
        if adds_special_tokens(processor):
            return f"{type(processor).__name__} adds special tokens to messages that do not begin with one"
    try:
        messages = [{"role": "user", "content": content}]
        probe = given.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
    except Exception as error:
        return f"the chat template does not render a message: {error!s:.200}"
    further = sorted(set(probe) - {"input_ids", "attention_mask", "mm_token_type_ids"})  # verl removes the last one
    return (
        f"the {'tokenizer' if processor is None else 'processor'} also returns {', '.join(further)}"
        if further
        else None
    )
