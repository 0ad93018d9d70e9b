"""RLHFDataset: verl's prompt dataset with gpuload's loading. The rows are the same.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset +data.gpuload.device=auto

gpuload reads the files and drops overlong prompts; rows are Arrow columns until they are accessed. Data that gpuload
cannot load exactly as verl does (audio, plain strings ...) falls back to verl's own dataset class, and a warning says
why. So do images, with a filter that looks only at their headers: see `media.py`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from gpuload.core.arrays import row_numbers
from gpuload.core.errors import DataError, DeviceError, ResumeError
from gpuload.core.options import Options, plain
from gpuload.core.workers import prepare_worker
from gpuload.dataset.fingerprint import Fingerprint, difference
from gpuload.integrations.core import are_messages, log_fallback
from gpuload.integrations.processors import chosen_template
from gpuload.integrations.verl import ray
from gpuload.integrations.verl.contract import difference as stock_difference
from gpuload.integrations.verl.media import FilteredByHeaders
from gpuload.integrations.verl.reading import (
    DecodedColumnError,
    LoadedRows,
    LoadRequest,
    content_digest,
    file_digest,
    load_rows,
    media_column,
    open_files,
)
from gpuload.integrations.verl.reuse import DIGEST_KEY, IDS_KEY, prompt_digest, source_digest
from gpuload.integrations.verl.rows import ArrowRows
from gpuload.integrations.verl.settings import Settings
from gpuload.sources.read import Source
from gpuload.sources.types import check_prompt_type, is_messages

logger = logging.getLogger(__name__)

# Outputs of a rollout. verl's agent loops write the columns of a row over the outputs, so a column with such a name
# would replace one.
RESERVED_KEYS = frozenset({"input_ids", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"})
_OWN_KEYS = RESERVED_KEYS | {IDS_KEY, DIGEST_KEY}

# Arguments of `apply_chat_template` that are not variables of the template, and change the length or raise.
_UNSUPPORTED_KWARGS = frozenset(
    "add_generation_prompt continue_final_message conversation max_length padding processor_kwargs tokenizer_kwargs "
    "truncation return_assistant_tokens_mask".split()
)
# Arguments that verl's class ignores without a processor, and passes on with one.
_IGNORED_WITHOUT_PROCESSOR = frozenset({"tokenize", "return_dict", "return_tensors"})

_STATE_VERSION = 1


class RLHFDataset(FilteredByHeaders):
    """verl's RLHFDataset with gpuload's loading.

    Takes the same arguments and `data:` section as verl's class, and gives the same rows. Further settings are read
    from `data.gpuload`: see `Settings`.

    Attributes:
        dataframe: the rows: `ArrowRows`, or a `datasets.Dataset` if verl's own class loaded the data.
        report: what the load did, as text; empty if verl's own class loaded the data.

    Raises:
        OptionError: an unknown key under `data.gpuload`, or an invalid value.
        SourceError: a file that cannot be found or read.
        DataError: there is no prompt column, or all rows were dropped.
        DeviceError: the GPU that `data.gpuload.device` names is not available.
    """

    dataframe: Any
    report: str
    is_compared = False  # true in a subclass, whose rows are compared with verl's
    _source_digest: str | None = None  # see reuse.py; None if rows carry no ids

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1):
        self.gpuload = Settings.parse(config)
        super().__init__(data_files, tokenizer, config, processor, max_samples)

    def _read_files_and_tokenize(self) -> None:
        self.report = ""
        if self.gpuload.reuse_ids:
            # Computed before loading: if the date changes meanwhile, ids with the old date must not match the new one.
            self._source_digest = source_digest(self.tokenizer, self._template_kwargs(), self.tool_schemas)
        try:
            sources = open_files(self.data_files, self.cache_dir)
            reason = self._unsupported_reason(sources)
            if reason is None and not self.is_compared:
                given = self.tokenizer, self.config, self.processor
                reason = stock_difference(RLHFDataset, VerlDataset, sources, given, _OWN_KEYS)
        except DecodedColumnError as error:
            reason = str(error)
        if reason:
            log_fallback(logger, "verl's own dataset class", reason)
            super()._read_files_and_tokenize()
            self._fingerprint = self._fingerprint_of_verl_rows()
        else:
            loaded = self._load(sources)
            self.dataframe, self.report, self._fingerprint = loaded.rows, loaded.report, loaded.fingerprint
            _print(f"gpuload: {self.report}")
        if removed := [name for name in self.dataframe.column_names if name in RESERVED_KEYS]:
            logger.warning(
                "gpuload: columns %s are removed from the rows: verl's rollout has outputs with these names",
                ", ".join(map(repr, removed)),
            )

    @property
    def _media_keys(self) -> list[str]:
        """Names of the columns of images, videos and audio, which verl removes from rows. verl 0.7 knows no audio."""
        keys = ("image_key", "video_key", "audio_key")
        return [getattr(self, key) for key in keys if hasattr(self, key)]

    @property
    def _tokenize(self) -> bool:
        return bool(self.filter_overlong_prompts) or self.gpuload.reuse_ids

    def _load(self, sources: list[Source]) -> LoadedRows:
        """Load in this process, or in a Ray task with a GPU if `ray_gpu` is set and this process has no GPU."""
        tokenizer, options = self._tokenizer_and_options()
        request = LoadRequest(tuple(self.data_files), tokenizer, options, self._tokenize, self.gpuload.reuse_ids)
        if not self.gpuload.ray_gpu or not request.tokenize or self.is_compared:
            return load_rows(request, sources)
        from gpuload.engines.device import cuda

        no_local_gpu = cuda.unavailable_reason("cuda")
        if no_local_gpu is None:
            return load_rows(request, sources)
        if no_task := ray.no_gpu_task_reason():
            logger.warning(
                "gpuload: loading without a GPU. In this process: %s. In a Ray task: %s", no_local_gpu, no_task
            )
            if request.options.device.startswith("cuda"):
                raise DeviceError(
                    f"data.gpuload.device={request.options.device} is not available. In this process: {no_local_gpu}. "
                    f"In a Ray task (ray_gpu=true): {no_task}"
                )
            return load_rows(request, sources)
        _print(f"gpuload: loading in a Ray task with a GPU. In this process: {no_local_gpu}")
        return ray.load_in_task(request)

    # -- options of the load -------------------------------------------------------------------------------------------

    def _tokenizer_and_options(self) -> tuple[Any, Options]:
        """The tokenizer that determines lengths, and gpuload's options with the same meaning as verl's."""
        kwargs = {key: value for key, value in self._template_kwargs().items() if key not in _IGNORED_WITHOUT_PROCESSOR}
        kwargs.pop("chat_template", None)
        if self.tool_schemas is not None:
            kwargs["tools"] = self.tool_schemas
        # verl renders with the processor's template, but encodes with the tokenizer inside the processor.
        tokenizer = self.tokenizer if self.processor is None else self.processor.tokenizer
        return tokenizer, Options.parse(
            {
                "prompt_key": self.prompt_key,
                "max_prompt_length": self.max_prompt_length,
                "filter_overlong_prompts": bool(self.filter_overlong_prompts),
                "apply_chat_template_kwargs": kwargs,
                "chat_template": self._chat_template() or "default",
                "max_samples": self.max_samples if self.max_samples > 0 else -1,
                "shuffle": bool(self.shuffle),
                "seed": self.seed,
                "cache_dir": self.cache_dir,
                "return_raw_chat": True,
                "tokens_on": "host",
                "pad_token_id": 0,  # never used, but avoids an error for a tokenizer without a padding token
                **self.gpuload.options(),
            }
        )

    def _template_kwargs(self) -> dict[str, Any]:
        return dict(plain(self.apply_chat_template_kwargs or {}))

    def _chat_template(self) -> str | None:
        """The text or name of the template to use instead of the tokenizer's default, or None."""
        given: str | None = self._template_kwargs().get("chat_template")
        return given if self.processor is None else chosen_template(self.processor, given)

    # -- fallback to verl's own class ----------------------------------------------------------------------------------

    def _unsupported_reason(self, sources: list[Source]) -> str | None:
        """Why gpuload cannot load these files exactly as verl's class does, or None if it can.

        Raises:
            DataError: no file has the prompt column.
        """
        if type(self).maybe_filter_out_long_prompts is not FilteredByHeaders.maybe_filter_out_long_prompts:
            return f"{type(self).__name__} overrides maybe_filter_out_long_prompts"
        types = [
            source.schema.field(self.prompt_key).type for source in sources if self.prompt_key in source.schema.names
        ]
        if not types:
            names = ", ".join(dict.fromkeys(name for source in sources for name in source.schema.names))
            raise DataError(f"{sources[0].name}: no column {self.prompt_key!r}. Its columns are {names}")
        if column := next((found for source in sources if (found := media_column(source, self._media_keys))), None):
            return f"column {column!r} holds images, videos or audio"
        if not self._tokenize:
            return None
        if len(types) < len(sources):
            return f"some files have no column {self.prompt_key!r}"
        for source, kind in zip(sources, types, strict=True):
            where = f"{source.name}: column {self.prompt_key!r}"
            try:
                check_prompt_type(kind, where)
            except DataError as error:
                return str(error)
            if not is_messages(kind):
                return f"{where} holds {kind}, not messages"
            if self.processor is not None and not are_messages(kind):
                return f"{where}: messages have no role, or contents that are not text, and there is a processor"
        return self._unsupported_template_reason()

    def _unsupported_template_reason(self) -> str | None:
        unsupported = _UNSUPPORTED_KWARGS
        if self.processor is not None:
            unsupported = unsupported | _IGNORED_WITHOUT_PROCESSOR
        if found := sorted(unsupported & set(self._template_kwargs())):
            return f"apply_chat_template_kwargs.{found[0]} is set"
        if self.processor is None:
            return None
        if not hasattr(self, "audio_key"):
            return "verl 0.7 encodes prompts with the processor"
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        kind = type(self.processor)
        if getattr(kind, "apply_chat_template", None) is not ProcessorMixin.apply_chat_template:
            return f"{kind.__name__} overrides apply_chat_template"
        if type(self)._build_messages is not VerlDataset._build_messages:
            return f"{type(self).__name__} overrides _build_messages, and there is a processor"
        if not isinstance(getattr(self.processor, "tokenizer", None), PreTrainedTokenizerBase):
            return f"{kind.__name__} has no transformers tokenizer"
        if self._chat_template() is None:
            return f"{kind.__name__} has no chat template"
        return None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: int) -> dict[str, Any]:
        if isinstance(self.dataframe, ArrowRows):
            # verl's __getitem__ modifies the row it takes from `dataframe`: give it a fresh one.
            return RLHFDataset.__getitem__(self._with_dataframe({item: self.dataframe[item]}), item)
        row: dict[str, Any] = super().__getitem__(item)
        return self._prepare_for_rollout(row)

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of one batch. Called by torch's fetcher instead of `__getitem__`."""
        prepare_worker()
        numbers = row_numbers(items, len(self)).tolist()
        if not isinstance(self.dataframe, ArrowRows) or len(set(numbers)) < len(numbers):
            return [self[number] for number in numbers]
        rows, kind = self.dataframe.take(numbers), type(self)
        if kind.__getitem__ is RLHFDataset.__getitem__ and kind._build_messages is VerlDataset._build_messages:
            return self._finish_rows(rows)
        # A subclass changes what a row is.
        batch = self._with_dataframe(dict(zip(numbers, rows, strict=True)))
        return [batch[number] for number in numbers]

    def _finish_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Do what verl's `__getitem__` does, for a whole batch.

        verl makes a tensor per row, which takes longer than everything else here. Images, videos and audio need no
        handling: such data falls back to verl's own class.
        """
        media_keys = self._media_keys
        dummies = torch.zeros((len(rows), 1), dtype=torch.uint8).unbind(0)
        for row, dummy in zip(rows, dummies, strict=True):
            row["raw_prompt"] = row[self.prompt_key]
            for name in media_keys:
                row.pop(name, None)
            row["dummy_tensor"] = dummy
            if row.get("extra_info") is None:
                row["extra_info"] = {}
            extra = row["extra_info"]
            row["index"] = extra.get("index", 0)
            row["tools_kwargs"] = extra.get("tools_kwargs", {})
            row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
            if extra.get("need_tools_kwargs", self.need_tools_kwargs) and not row["tools_kwargs"]:
                source = row["data_source"]
                logger.warning("gpuload: tools_kwargs is empty for index %s, data source: %s", row["index"], source)
            self._prepare_for_rollout(row)
        return rows

    def _prepare_for_rollout(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove reserved keys, and add the digest that allows the agent loop to reuse the ids."""
        for name in RESERVED_KEYS & row.keys():
            del row[name]
        if self._source_digest is not None and IDS_KEY in row:
            row[DIGEST_KEY] = prompt_digest(self._source_digest, row["raw_prompt"]) if row[IDS_KEY] else None
        return row

    def _with_dataframe(self, rows: ArrowRows | Mapping[int, dict[str, Any]]) -> "RLHFDataset":
        """A shallow copy of this dataset with other rows."""
        view: RLHFDataset = object.__new__(type(self))
        view.__dict__ = {**self.__dict__, "dataframe": rows}
        return view

    def split(self, num_splits: int) -> list["RLHFDataset"]:
        """Split the rows into equal, contiguous parts, as verl's method does. Nothing is read again.

        Raises:
            ValueError: `num_splits` is not a positive integer, or there are no rows.
            AttributeError: nothing has been loaded.
        """
        if not isinstance(num_splits, int) or num_splits <= 0:
            raise ValueError(f"num_splits={num_splits!r}: expected a positive integer")
        if not hasattr(self, "dataframe"):
            raise AttributeError("the dataset has no dataframe: call resume_dataset_state() before split()")
        if self.dataframe is None or not len(self.dataframe):
            raise ValueError("the dataset has no rows to split")
        size, remainder = divmod(len(self.dataframe), num_splits)
        if remainder:
            logger.warning("gpuload: the last %d rows are not in any of %d splits of %d", remainder, num_splits, size)
        return [self._with_dataframe(self.dataframe.select(range(i * size, (i + 1) * size))) for i in range(num_splits)]

    # -- state: torch's StatefulDataLoader saves it with its own, in every worker --------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint of the data, for a checkpoint."""
        return {"version": _STATE_VERSION, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint was made with this data: otherwise its position refers to other rows.

        Raises:
            ResumeError: it was not; the message names the differences. A warning with
                `data.gpuload.strict_resume=false`.
        """
        saved = state.get("fingerprint")
        # A checkpoint of an earlier version has no digests of columns.
        if isinstance(saved, Mapping) and {"columns": self._fingerprint["columns"], **saved} == self._fingerprint:
            return
        differs = _difference(saved, self._fingerprint) if isinstance(saved, Mapping) else "it has no fingerprint"
        if self.gpuload.strict_resume:
            raise ResumeError(
                f"the checkpoint was made with different data: {differs}. "
                "Set data.gpuload.strict_resume=false to resume with this data anyway"
            )
        logger.warning("gpuload: the checkpoint was made with different data (strict_resume is off): %s", differs)

    def _fingerprint_of_verl_rows(self) -> Fingerprint:
        """A fingerprint of rows that verl's own class loaded."""
        names = [f"{number}: {os.path.basename(file)}" for number, file in enumerate(self.data_files)]
        return {
            "files": dict(zip(names, (content_digest(file).hex() for file in self.data_files), strict=True)),
            "tokenizer": None,
            "options": {
                "prompt_key": self.prompt_key,
                "max_prompt_length": self.max_prompt_length,
                "filter_overlong_prompts": bool(self.filter_overlong_prompts),
                "max_samples": self.max_samples,
            },
            "tokens": len(self.dataframe),
            "columns": dict(zip(names, (file_digest(file).hex() for file in self.data_files), strict=True)),
        }


def _print(line: str) -> None:
    """Prints a line, once for all ranks, as verl does."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(line)


def _difference(saved: Mapping[str, Any], current: Fingerprint) -> str:
    """Describe the differences between two fingerprints."""
    same = all(saved.get(part) == current[part] for part in ("files", "options", "tokenizer"))
    if same and saved.get("tokens") != current["tokens"]:
        return "another random sample of rows: data.max_samples with data.shuffle needs the same data.seed in both runs"
    # `difference` ignores the files if the tokens are the same. Rows have other columns too: make the tokens differ.
    return difference({**saved, "tokens": None}, {**current, "tokens": ""}) or ""
