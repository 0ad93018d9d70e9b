"""verl's RLHFDataset, loaded by gpuload: the same rows, in seconds.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset +data.gpuload.device=auto

Reading and the length filter are gpuload's; a row is finished by verl's own code, from the columns as Arrow keeps them.
Data that gpuload does not load as verl does (images, audio, plain strings ...) goes verl's own way, and the log says
why.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset
from verl.utils.logger import print_rank_0

from gpuload.errors import DataError, DeviceError, ResumeError
from gpuload.fingerprint import Fingerprint, difference
from gpuload.integrations.verl import ray
from gpuload.integrations.verl.reading import DecodedColumnError, Loaded, LoadRequest, identity, load_rows, open_files
from gpuload.integrations.verl.reuse import IDS, SEAL, prompt_source, seal
from gpuload.integrations.verl.rows import Rows
from gpuload.integrations.verl.settings import Settings
from gpuload.options import Options, plain
from gpuload.sources.read import Source
from gpuload.sources.types import check_prompt_type

logger = logging.getLogger(__name__)

# verl's agent loops lay a row's keys over what the rollout has made: a column of such a name would take its place.
RESERVED = frozenset({"input_ids", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"})

# Arguments of `apply_chat_template` that make other lengths of it, or an error: not the template's own variables.
_NOT_FOR_THE_TEMPLATE = frozenset(
    "add_generation_prompt continue_final_message conversation max_length padding processor_kwargs tokenizer_kwargs "
    "truncation return_assistant_tokens_mask".split()
)
# What verl's class takes out itself, where there is no processor.
_TAKEN_OUT = frozenset({"tokenize", "return_dict", "return_tensors"})

_STATE_VERSION = 1


class RLHFDataset(VerlDataset):  # type: ignore[misc]
    """verl's class with another way to load. Arguments, keys of the `data:` section and rows are verl's.

    Keys of its own, under `data.gpuload`: see `Settings`.

    Attributes:
        dataframe: the rows: `Rows`, or a `datasets.Dataset` where the data goes verl's own way.
        report: what the load did, for people; empty where the data goes verl's own way.

    Raises:
        OptionError: an unknown key under `data.gpuload`.
        DataError: no prompt column, no row left.
        SourceError: a file that cannot be found or read.
    """

    dataframe: Any
    report: str
    _source: str | None = None  # what decides ids besides messages, where rows carry ids

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self.gpuload = Settings.parse(config)
        super().__init__(data_files, tokenizer, config, processor, max_samples)

    def _read_files_and_tokenize(self) -> None:
        self.report = ""
        if self.gpuload.reuse_ids:
            # Before the load: should a new day begin meanwhile, ids of the new one are not taken for the old one's.
            self._source = prompt_source(self.tokenizer, self._template_kwargs(), self.tool_schemas)
        try:
            sources = open_files(self.data_files, self.cache_dir)
            why = self._obstacle(sources)
        except DecodedColumnError as error:
            why = str(error)
        if why:
            logger.warning("gpuload: the data goes verl's own way, row by row: %s", why)
            super()._read_files_and_tokenize()
            names, self._about = self.dataframe.column_names, self._about_verls_rows()
        else:
            loaded = self._load(sources)
            self.dataframe, self.report, self._about = loaded.rows, loaded.report, loaded.about
            names = self.dataframe.column_names
            print_rank_0(f"gpuload: {self.report}")
        if hidden := [name for name in names if name in RESERVED]:
            logger.warning(
                "gpuload: rows do not carry %s: verl's rollout makes values of that name", ", ".join(map(repr, hidden))
            )

    @property
    def _tokenize(self) -> bool:
        return bool(self.filter_overlong_prompts) or self.gpuload.reuse_ids

    def _load(self, sources: list[Source]) -> Loaded:
        """In a Ray task with a GPU, where one is asked for and this process has none; else here."""
        tokenizer, options = self._tokenizer_and_options()
        request = LoadRequest(tuple(self.data_files), tokenizer, options, self._tokenize, self.gpuload.reuse_ids)
        if not self.gpuload.ray_gpu or not request.tokenize:
            return load_rows(request, sources)
        from gpuload.engines.device import cuda

        hidden = cuda.unavailable_reason("cuda")
        if hidden is None:
            return load_rows(request, sources)
        if why_not := ray.obstacle():
            logger.warning("gpuload: loading without a GPU: here %s; no Ray task with one: %s", hidden, why_not)
            if request.options.device.startswith("cuda"):
                raise DeviceError(
                    f"data.gpuload.device={request.options.device}: {hidden}; and with ray_gpu: {why_not}"
                )
            return load_rows(request, sources)
        print_rank_0(f"gpuload: loading in a Ray task with a GPU: here {hidden}")
        return ray.load_in_task(request)

    # -- what decides lengths ------------------------------------------------------------------------------------------

    def _tokenizer_and_options(self) -> tuple[Any, Options]:
        """Who decides a prompt's length, and gpuload's options of the same meaning as verl's."""
        kwargs = {key: value for key, value in self._template_kwargs().items() if key not in _TAKEN_OUT}
        kwargs.pop("chat_template", None)
        if self.tool_schemas is not None:
            kwargs["tools"] = self.tool_schemas
        # With a processor, verl renders with its template and encodes with its tokenizer.
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
                "pad_token_id": 0,  # nothing is padded, and a tokenizer without such a token will do
                **self.gpuload.options(),
            }
        )

    def _template_kwargs(self) -> dict[str, Any]:
        return dict(plain(self.apply_chat_template_kwargs or {}))

    def _chat_template(self) -> str | None:
        """The template that is not the tokenizer's own."""
        given: str | None = self._template_kwargs().get("chat_template")
        if self.processor is None:
            return given
        own = self.processor.chat_template
        named = own if isinstance(own, Mapping) else {"default": own}
        return named.get(given or "default", given)

    # -- what goes verl's own way --------------------------------------------------------------------------------------

    def _obstacle(self, sources: list[Source]) -> str | None:
        """Why gpuload cannot do what verl's class does with these files, or None.

        Raises:
            DataError: no file has the prompt column.
        """
        if type(self).maybe_filter_out_long_prompts is not VerlDataset.maybe_filter_out_long_prompts:
            return f"{type(self).__name__} has a maybe_filter_out_long_prompts of its own"
        kinds = [
            source.schema.field(self.prompt_key).type for source in sources if self.prompt_key in source.schema.names
        ]
        if not kinds:
            names = ", ".join(dict.fromkeys(name for source in sources for name in source.schema.names))
            raise DataError(f"{sources[0].name}: no column {self.prompt_key!r}. Its columns are {names}")
        if column := next((found for source in sources if (found := self._media_column(source))), None):
            return f"column {column!r} holds images, videos or audio"
        if not self._tokenize:
            return None
        if len(kinds) < len(sources):
            return f"some files have no column {self.prompt_key!r}"
        for source, kind in zip(sources, kinds, strict=True):
            where = f"{source.name}: column {self.prompt_key!r}"
            try:
                check_prompt_type(kind, where)
            except DataError as error:
                return str(error)
            if not _is_messages(kind):
                return f"{where} holds {kind}, not messages"
            if self.processor is not None and not _has_plain_content(kind):
                return f"{where}: messages have contents other than text, and there is a processor"
        return self._template_obstacle()

    def _template_obstacle(self) -> str | None:
        odd = _NOT_FOR_THE_TEMPLATE if self.processor is None else _NOT_FOR_THE_TEMPLATE | _TAKEN_OUT
        if found := sorted(odd & set(self._template_kwargs())):
            return f"apply_chat_template_kwargs.{found[0]} is set"
        if self.processor is None:
            return None
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        kind = type(self.processor)
        if getattr(kind, "apply_chat_template", None) is not ProcessorMixin.apply_chat_template:
            return f"{kind.__name__} has an apply_chat_template of its own"
        if type(self)._build_messages is not VerlDataset._build_messages:
            return f"{type(self).__name__} has a _build_messages of its own, and there is a processor"
        if not isinstance(getattr(self.processor, "tokenizer", None), PreTrainedTokenizerBase):
            return f"{kind.__name__} has no tokenizer of transformers"
        if self._chat_template() is None:
            return f"{kind.__name__} has no chat template"
        return None

    def _media_column(self, source: Source) -> str | None:
        """The column of this source in which there is an image, a video or an audio recording."""
        for name in (self.image_key, self.video_key, self.audio_key):
            if name in source.schema.names and any(map(_holds_something, _column(source, name))):
                return str(name)
        return None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: int) -> dict[str, Any]:
        if isinstance(self.dataframe, Rows):
            return RLHFDataset.__getitem__(self._over({item: self.dataframe[item]}), item)
        row: dict[str, Any] = super().__getitem__(item)
        return self._as_rollouts_take_it(row)

    def _as_rollouts_take_it(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row without the names that a rollout makes values of, and with the seal of its ids."""
        for name in RESERVED & row.keys():
            del row[name]
        if self._source is not None and IDS in row:
            row[SEAL] = seal(self._source, row["raw_prompt"]) if row[IDS] else None
        return row

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of one batch: torch's fetcher calls this once for each."""
        numbers = [int(item) for item in items]
        if not isinstance(self.dataframe, Rows) or len(set(numbers)) < len(numbers):
            return [self[number] for number in numbers]
        rows = self.dataframe.take(numbers)
        if self._rows_are_verls:
            return self._finished(rows)
        drawn = self._over(dict(zip(numbers, rows, strict=True)))
        return [drawn[number] for number in numbers]

    @property
    def _rows_are_verls(self) -> bool:
        """Whether no subclass makes something else of a row."""
        kind = type(self)
        return kind.__getitem__ is RLHFDataset.__getitem__ and kind._build_messages is VerlDataset._build_messages

    def _finished(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as verl's `__getitem__` gives them. It would work on them one by one, and to make a tensor for each
        takes longer than all the rest. There are no images, videos or audio in them: such data goes verl's own way."""
        dummies = torch.zeros((len(rows), 1), dtype=torch.uint8).unbind(0)
        for row, dummy in zip(rows, dummies, strict=True):
            row["raw_prompt"] = row[self.prompt_key]
            for name in (self.image_key, self.video_key, self.audio_key):
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
                logger.warning("gpuload: tools_kwargs is empty for index %s, data source %s", row["index"], source)
            self._as_rollouts_take_it(row)
        return rows

    def _over(self, rows: Rows | Mapping[int, dict[str, Any]]) -> "RLHFDataset":
        """This data set over other rows: a part of them, or some that verl's own code is to finish."""
        drawn: RLHFDataset = object.__new__(type(self))
        drawn.__dict__ = {**self.__dict__, "dataframe": rows}
        return drawn

    def split(self, num_splits: int) -> list["RLHFDataset"]:
        """As verl's, over the rows that are there: nothing is read again.

        Raises:
            ValueError: not a positive integer, or there are no rows.
            AttributeError: nothing was loaded.
        """
        if not isinstance(num_splits, int) or num_splits <= 0:
            raise ValueError(f"num_splits={num_splits!r}: expected a positive integer")
        if not hasattr(self, "dataframe"):
            raise AttributeError("nothing to split: the data set has no dataframe, its files were not read")
        if self.dataframe is None or not len(self.dataframe):
            raise ValueError("nothing to split: the data set has no rows")
        size, left = divmod(len(self.dataframe), num_splits)
        if left:
            logger.warning("gpuload: %d rows are left out of %d splits of %d", left, num_splits, size)
        return [self._over(self.dataframe.select(range(i * size, (i + 1) * size))) for i in range(num_splits)]

    # -- state: torch's StatefulDataLoader saves it with its own, in every worker --------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the data is made of, as plain data."""
        return {"version": _STATE_VERSION, "fingerprint": self._about}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes sure that a checkpoint is of this data: its place in it would mean other rows.

        Raises:
            ResumeError: it is of other data; names what differs. `data.gpuload.strict_resume=false` makes it a warning.
        """
        saved = state.get("fingerprint")
        if saved == self._about:
            return
        differs = _difference(saved, self._about) if isinstance(saved, Mapping) else "it does not say of which"
        if self.gpuload.strict_resume:
            raise ResumeError(
                f"the checkpoint is of other data: {differs}. "
                "data.gpuload.strict_resume=false goes on with this data in spite of it"
            )
        logger.warning("gpuload: the checkpoint is of other data, and strict_resume is off: %s", differs)

    def _about_verls_rows(self) -> Fingerprint:
        """A fingerprint of rows that verl loaded."""
        return {
            "files": {f"{i}: {os.path.basename(file)}": identity(file).hex() for i, file in enumerate(self.data_files)},
            "tokenizer": None,
            "options": {
                "prompt_key": self.prompt_key,
                "max_prompt_length": self.max_prompt_length,
                "filter_overlong_prompts": bool(self.filter_overlong_prompts),
                "max_samples": self.max_samples,
            },
            "tokens": len(self.dataframe),
        }


def _difference(saved: Mapping[str, Any], current: Fingerprint) -> str:
    """In words, what makes it other data."""
    if all(saved.get(part) == current[part] for part in ("files", "options", "tokenizer")):
        return "other rows were drawn: data.max_samples with data.shuffle needs a data.seed, the same one"
    # Unlike tokens, rows are the same only if their files are.
    return difference({**saved, "tokens": None}, {**current, "tokens": ""}) or ""


def _is_messages(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)


def _has_plain_content(messages: pa.DataType) -> bool:
    fields = {field.name: field.type for field in messages.value_type}
    return "content" in fields and bool(
        pa.types.is_string(fields["content"]) or pa.types.is_large_string(fields["content"])
    )


def _column(source: Source, name: str) -> Iterator[Any]:
    """One column, part by part; no other is read."""
    if source.parquet is None:
        yield from (table.column(name) for table in source.batches())
        return
    with pq.ParquetFile(source.parquet) as file:
        yield from (batch.column(0) for batch in file.iter_batches(64, columns=[name]))


def _holds_something(column: Any) -> bool:
    return any(column.to_pylist())
