"""prompts(): a dataset for TRL's `GRPOTrainer` and the other trainers that generate, without overlong prompts."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.errors import DataError, GpuloadError, NoRowsError, OptionError
from gpuload.engines.kept import KeptEngine
from gpuload.export import features_of
from gpuload.integrations.core import are_messages
from gpuload.kinds.chats.formats import messages_column
from gpuload.kinds.load import load
from gpuload.kinds.prompts import PromptKind, reference_of
from gpuload.pipeline.run import load_given

_BATCH = 1_000
"""Rows of a stream that are tokenized together."""

_WITHOUT_EFFECT = ("max_samples", "shuffle", "seed", "distributed", "store", "token_cache", "token_cache_bytes")
"""Options that have no meaning for a stream."""

logger = logging.getLogger("gpuload.integrations.trl")


def prompts(files: Any, tokenizer: Any, max_prompt_length: int, **options: Any) -> Any:
    """Load prompts for a trainer that generates, and drop those that are too long.

    `GRPOTrainer` of TRL 1.16 neither drops nor truncates long prompts.

    Examples:
        >>> from gpuload.demo_data import demo_files
        >>> from gpuload.integrations.trl import prompts
        >>> file, tokenizer = demo_files()
        >>> prompts(file, tokenizer, 80, max_samples=100).column_names
        ['prompt', 'data_source', 'ability', 'reward_model', 'extra_info']

    Args:
        files: As for `gpuload.load`; or an `IterableDataset`, whose rows are tokenized in batches when they are read.
        tokenizer: As for `gpuload.load`.
        max_prompt_length: Maximum length of a prompt in tokens, with the generation prompt.
        **options: Further options of `gpuload.load`. `apply_chat_template_kwargs` should be the `chat_template_kwargs`
            of `GRPOConfig`, with `tools` if the trainer has some.

    Returns:
        A `datasets.Dataset` of the rows that were kept, in their order, over the Arrow columns of the load: `prompt`,
        a list of messages, and the other columns of the files. Of a stream, a stream of the rows that are kept; it can
        be resumed as any other of `datasets`.

    Raises:
        DataError: Prompts are not messages with text, or a column has a type that `datasets` does not have. Rows of a
            stream raise it when they are read.
        OptionError: Several splits, or an option that has no meaning for a stream.
        GpuloadError: The package `datasets` is not installed; or as for `gpuload.load`.
    """
    try:
        import datasets
        from datasets.fingerprint import Hasher
        from datasets.table import InMemoryTable
    except ImportError as error:
        raise GpuloadError("prompts for TRL need the package datasets: pip install 'gpuload[trl]'") from error
    fixed = {"max_prompt_length": max_prompt_length, "filter_overlong_prompts": True, "return_raw_chat": True}
    if isinstance(files, dict):
        raise OptionError(
            f"files are the splits {', '.join(map(repr, files))}: pass one of them, such as files['train']"
        )
    if isinstance(files, datasets.IterableDataset):
        return _stream(files, tokenizer, {**options, **fixed})
    loaded = load(files, tokenizer, **{**options, **fixed})
    table = loaded.columns
    if not are_messages(table.schema.field("raw_prompt").type):
        raise _no_messages(loaded.options.prompt_key)
    if "prompt" in table.column_names:
        raise _two_columns(loaded.options.prompt_key)
    names = ["prompt" if name == "raw_prompt" else name for name in table.column_names]
    table = table.rename_columns(names)
    table = table.select(["prompt", *(name for name in names if name != "prompt")])
    table = table.cast(features_of(table.schema, datasets).arrow_schema)
    return datasets.Dataset(InMemoryTable(table), fingerprint=Hasher.hash(loaded.fingerprint))


def _no_messages(key: str) -> DataError:
    return DataError(
        f"column {key!r} has no messages with text: TRL renders and encodes other prompts in its own way, so pass "
        "lists of messages whose content is text"
    )


def _two_columns(key: str) -> DataError:
    return DataError(f"column 'prompt' exists next to prompt_key={key!r}: rename one of them")


def _stream(stream: Any, tokenizer: Any, given: dict[str, Any]) -> Any:
    """The rows of an `IterableDataset` that are kept, with these options of `gpuload.load`."""
    if found := [name for name in _WITHOUT_EFFECT if name in given]:
        raise OptionError(
            f"{found[0]}={given[found[0]]!r} has no effect on a stream: use the methods of datasets, such as take and "
            "shuffle"
        )
    kind, parsed = PromptKind.parse(given)
    if kind.turns == "served":
        raise OptionError("turns='served' is not made of a stream yet: load files")
    if any(each.__name__ == "ProcessorMixin" for each in type(tokenizer).__mro__):
        raise OptionError("prompts of a stream need a tokenizer, not a processor: pass processor.tokenizer")
    key = parsed.prompt_key
    names = stream.column_names or list(next(iter(stream), {key: None}))
    if key not in names:
        raise DataError(f"the stream has no column {key!r}: its columns are {', '.join(map(repr, names))}")
    if key != "prompt" and "prompt" in names:
        raise _two_columns(key)
    kept = _KeptPrompts(reference_of(tokenizer, parsed).tokenizer, given, key)
    types = stream.features
    if types is not None:
        types = type(types)({"prompt": types[key], **{name: types[name] for name in types if name != key}})
    return stream.map(kept, batched=True, batch_size=_BATCH, remove_columns=names, features=types)


class _KeptPrompts:
    """A batch of rows → those that are kept, with `prompt` as their first column."""

    def __init__(self, tokenizer: Any, options: dict[str, Any], key: str):
        self._tokenizer, self._key = tokenizer, key
        self._options = options | {"prompt_key": key, "token_cache": False, "store": "memory", "progress": False}
        self._engines = KeptEngine(PromptKind().engine)
        self._told: set[str] = set()

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        prompts = batch[self._key]
        if not all(map(_are_text_messages, prompts)):
            raise _no_messages(self._key)
        numbers = self._numbers(prompts)
        names = [self._key, *(name for name in batch if name != self._key)]
        rows = {name: [batch[name][number] for number in numbers] for name in names}
        return {"prompt": rows.pop(self._key)} | rows

    def _numbers(self, prompts: Sequence[Any]) -> list[int]:
        """The rows that are kept."""
        table = pa.table({self._key: messages_column(prompts)})
        try:
            loaded = load_given(PromptKind, table, self._tokenizer, self._options, self._engines)
            report, numbers = loaded.report, loaded.origins[:, 1]
        except NoRowsError as error:
            report, numbers = error.report, np.zeros(0, np.int64)
        for reason in report.rejected.keys() - self._told:
            self._told.add(reason)
            logger.warning("gpuload: prompts of a stream are dropped: %s", reason)
        return [int(number) for number in numbers]


def _are_text_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str | None) for message in prompt
    )
