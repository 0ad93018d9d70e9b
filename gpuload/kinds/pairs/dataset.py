"""PairDataset: preference data, as TRL's trainers take it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Ragged, row_numbers, selected
from gpuload.core.arrow import as_arrow
from gpuload.core.errors import OptionError
from gpuload.core.marks import split
from gpuload.core.options import Objective, Padding, Trainer, Truncation
from gpuload.core.words import counted
from gpuload.dataset.arrow import INT32_LIST, lists, names_of, row_reader
from gpuload.dataset.batch import RowBatch
from gpuload.dataset.loader import PromptLoader
from gpuload.dataset.rows import Loaded, Made, Numbers, Rows, Values
from gpuload.dataset.trainer_columns import CHATS, PAIRS, arrays, check_columns, fields
from gpuload.engines.batches import BatchLayout
from gpuload.kinds.formats import LABELS
from gpuload.kinds.pairs.formats import MARGIN
from gpuload.kinds.pairs.sizes import PairSizes
from gpuload.packing.plan import Plan, whole_rows

Flags = np.ndarray[Any, np.dtype[np.bool_]]

OF_OTHER_ROWS = "KL_completion_ids"
"""The column of rows for `"kto"` that is made of other rows: the completion of another one."""

LABEL = "label"  # the column of rows for `"kto"` that says whether their completion is a good one


def pair_fields(objective: Objective) -> tuple[pa.Field, ...]:
    """The columns of rows as Arrow that are made of tokens."""
    names = {
        "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
        "rm": ("chosen_ids", "rejected_ids"),
        "kto": ("prompt_ids", "completion_ids", OF_OTHER_ROWS),
    }
    lists = tuple(pa.field(name, INT32_LIST) for name in names[objective])
    return (*lists, pa.field(LABEL, pa.bool_())) if objective == "kto" else lists


def layout_of(objective: Objective | None) -> BatchLayout:
    """Of padded batches of sequences. Reward models learn from all of their tokens."""
    return BatchLayout("right", ("input_ids", "attention_mask", *(("completion_mask",) if objective != "rm" else ())))


class PairDataset(Rows):
    """Tokenized preference data, and the other columns of its files. Made by `gpuload.load_pairs`.

    A map-style `torch.utils.data.Dataset`. A row is a dict of what TRL's trainer for its objective takes, lists of int:

    - `"dpo"`: `prompt_ids`, `chosen_ids` and `rejected_ids`.
    - `"rm"`: `chosen_ids` and `rejected_ids`, whole sequences; `margin`, if the files have it.
    - `"kto"`: `prompt_ids`, `completion_ids`, `label` (a bool), and `KL_completion_ids`: the completion of another row.

    And every other column of the files, as Python objects. Rows are not truncated. `batch` and `loader` give tensors
    `(B, L)` on the load's device, truncated and padded on the right.

    Attributes:
        report: What the load did; `print` it.
        options: The options of the load.
        objective: What the rows are for.
        kl_batch_size: Rows of a group in which `KL_completion_ids` are exchanged.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    def __init__(self, loaded: Loaded, objective: Objective, kl_batch_size: int, labels: Flags | None = None):
        super().__init__(loaded, layout_of(objective))
        self.sizes = PairSizes(*loaded.sizes)
        self._lengths = self.sizes.longer
        self.objective, self.kl_batch_size = objective, kl_batch_size
        self._given_labels = labels

    def __repr__(self) -> str:
        columns = "".join(f", {name}" for name in self.passed_through.names)
        tokens = int(self.sizes.all.sum())
        return f"PairDataset({counted(len(self), 'rows')} for {self.objective}, {counted(tokens, 'tokens')}{columns})"

    @property
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding and not truncated: `values`, int32, and `offsets`, int64 `(n + 1,)`.

        A pair is what both sequences begin with, then the rest of the chosen and the rest of the rejected one.
        """
        return split(self._store.to_host())[0]

    @property
    def column_names(self) -> list[str]:
        return names_of(pair_fields(self.objective), self.passed_through)

    def _parts(self, numbers: Numbers) -> dict[str, Ragged]:
        whole = self._sequences(numbers)
        whole.pop("KL_completion", None)  # of another row
        return {name: self._tokens(plan) for name, plan in whole.items()}

    def select(self, rows: Any) -> Self:
        chosen, numbers = super().select(rows), row_numbers(rows, len(self))
        chosen.sizes = PairSizes(*chosen._sizes)
        chosen._lengths = chosen.sizes.longer
        chosen._given_labels = None if self._given_labels is None else self._given_labels[numbers]
        return chosen

    @property
    def parts(self) -> Ragged:
        """The same ids with their bits, see `gpuload.core.marks`."""
        return self._store.to_host()

    @cached_property
    def labels(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(n,) bool, whether the completion of each row is desirable, for `"kto"`."""
        if self._given_labels is not None:
            return self._given_labels
        name = next(name for name in LABELS if name in self.passed_through.names)
        return np.array(self.take([name])[name], bool)

    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        made: dict[str, Sequence[Any]] = {name: ids.to_lists() for name, ids in self._ids(numbers).items()}
        return made | {"label": self.labels[numbers].tolist()} if self.objective == "kto" else made

    def batch(self, rows: Sequence[int] | Numbers, padding: Padding = "longest") -> RowBatch:
        """Return a batch of B rows.

        Examples:
            >>> tuple(pairs.batch([0], padding="longest")["input_ids"].shape)  # chosen and rejected
            (2, 8)

        Args:
            rows: Row numbers `(B,)`; negative numbers count from the end.
            padding: Width L of the tensors: `"longest"` for the longest sequence of the batch, `"max_length"` for
                `max_length`.

        Returns:
            A mapping with the tensors of TRL's data collator for this objective, int64 and padded on the right, and an
            object array `(B,)` for each other column, made when it is first read:

            - `"dpo"`: `input_ids`, `attention_mask` and `completion_mask`, `(2B, L)`, the chosen sequences first.
            - `"rm"`: `input_ids` and `attention_mask`, `(2B, L)`; `margin`, float32 `(B,)`, if the files have it.
            - `"kto"`: `input_ids`, `attention_mask`, `completion_mask` `(B, L)`; the same with the prefix `KL_` for the
                prompts with the completions of other rows; `label`, bool `(B,)`.

        Raises:
            IndexError: A row number is out of range.
        """
        return self._batch(rows, padding)

    def loader(self, batch_size: int, **settings: Any) -> PromptLoader:
        """Return an iterable over batches, with a state that can be saved and restored.

        Examples:
            >>> len(pairs.loader(batch_size=1))
            1

        Args:
            batch_size: Rows per batch.
            **settings: `shuffle`, `seed`, `rank`, `world_size`, `drop_last` and `padding`; see `PromptLoader`.
                `shuffle` and `seed` default to those given to `load_pairs`, and `padding` to `"longest"`.

        Returns:
            The loader.

        Raises:
            OptionError: A value is invalid, or `drop_last` leaves no batch.
        """
        return self._loader(batch_size, {"padding": "longest"} | settings)

    def to_arrow(self, *, columns: Sequence[str] | None = None, trainer: Trainer = "trl") -> pa.RecordBatchReader:
        """Return all rows as Arrow record batches, which are made one after the other.

        Examples:
            >>> pairs.to_arrow().schema.names
            ['prompt_ids', 'chosen_ids', 'rejected_ids']

        Args:
            columns: Which other columns of the files to add; None for all.
            trainer: Whose columns the rows have: `"trl"`, or for `"dpo"` also `"llamafactory"`.

        Returns:
            The batches. For `"trl"`: the lists of a row, as lists of int32, `label` (bool) for `"kto"`, `margin`
            (float64) for `"rm"` if the files have it, and the other columns.
            For `"llamafactory"`: `input_ids` (int32), `attention_mask` (int8) and `labels` (int32) of both sequences,
            truncated as in batches, with the prefixes `chosen_` and `rejected_`; `images`, `videos` and `audios`, which
            are null; and no other columns.

        Raises:
            OptionError: A column does not exist.
            DataError: Files have other types in a column, and no type has all of its values.
        """
        check_columns(trainer, PAIRS, columns)
        if trainer == "llamafactory":
            return self._for_llamafactory()
        own, others = [*pair_fields(self.objective)], self.passed_through
        with_margin = self.objective == "rm" and MARGIN in others.names
        if with_margin:  # in JSON, numbers with and without fractions have no type of Arrow
            own.append(pa.field(MARGIN, pa.float64()))
            columns = None if columns is None else [name for name in columns if name != MARGIN]

        def make(numbers: Numbers) -> list[pa.Array]:
            made: list[pa.Array] = [lists(ids.values, ids.offsets) for ids in self._ids(numbers).values()]
            if self.objective == "kto":
                made.append(as_arrow(self.labels[numbers]))
            if with_margin:
                made.append(as_arrow(np.array(others.take(numbers, [MARGIN])[MARGIN], np.float64)))
            return made

        return row_reader(self.sizes.all, own, make, others, columns)

    def _for_llamafactory(self) -> pa.RecordBatchReader:
        if self.objective != "dpo":
            raise OptionError(
                f"trainer='llamafactory' is for objective='dpo', not {self.objective!r}; its reward models are trained "
                "on the same rows"
            )
        names = CHATS["llamafactory"]
        own = [*fields(names, "chosen_"), *fields(names, "rejected_")]
        own += [pa.field(name, pa.null()) for name in ("images", "videos", "audios")]

        def make(numbers: Numbers) -> list[pa.Array]:
            made: list[pa.Array] = []
            for plan in self._truncated(numbers).values():
                rows = self._tokens(plan)
                made += arrays(names, *split(rows), rows.offsets)
            return [*made, *[pa.nulls(len(numbers))] * 3]

        return row_reader(self.sizes.all, own, make, self.passed_through, [])

    def _ids(self, numbers: Numbers) -> dict[str, Ragged]:
        """The ids of B rows, by their names in a row."""
        found: dict[str, Ragged] = {}
        for name, plan in self._sequences(numbers).items():
            ids, completion = split(self._tokens(plan))
            if self.objective == "rm":
                found[f"{name}_ids"] = ids
            else:
                if "prompt_ids" not in found:
                    found["prompt_ids"] = selected(ids, ~completion.values)
                found[f"{name}_ids"] = selected(ids, completion.values)
        return found

    def _partners(self, numbers: Numbers) -> Numbers:
        """(B,) rows whose completions other rows have as `KL_completion_ids`: the row before in its group of
        `kl_batch_size` consecutive rows, and for the first row of a group its last one."""
        first = numbers - numbers % self.kl_batch_size
        last = np.minimum(first + self.kl_batch_size, len(self)) - 1
        return np.where(numbers == first, last, numbers - 1)

    def _sequences(self, numbers: Numbers) -> dict[str, Plan]:
        """The two sequences of each of B rows; or one for "kto", and its prompt with the completion of another row."""
        sizes = self.sizes
        if self.objective != "kto":
            return dict(zip(("chosen", "rejected"), sizes.plans(numbers), strict=True))
        all_ids, others = sizes.all[numbers], self._partners(numbers)
        prompt, learned = whole_rows(numbers, all_ids - sizes.chosen_loss[numbers]), sizes.chosen_loss[others]
        completion = whole_rows(others, learned, sizes.all[others] - learned)
        return {"completion": whole_rows(numbers, all_ids), "KL_completion": Plan.joined(prompt, completion)}

    def _truncated(self, numbers: Numbers) -> dict[str, Plan]:
        """The sequences of B rows, of at most `max_length` tokens."""
        # Completions of other rows are never dropped for their length: TRL truncates them at their end.
        side: Truncation = "left" if self.options.truncation == "left" else "right"
        limit = self.options.max_prompt_length
        return {name: plan.truncated(limit, side) for name, plan in self._sequences(numbers).items()}

    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        sequences = self._truncated(numbers)

        def padded(*names: str) -> dict[str, torch.Tensor]:
            return self._padded(Plan.concatenate([sequences[name] for name in names]), padding)

        if self.objective == "kto":
            tensors = padded("completion") | {f"KL_{name}": each for name, each in padded("KL_completion").items()}
            tensors["label"] = torch.from_numpy(self.labels[numbers]).to(tensors["input_ids"].device)
            return tensors
        tensors = padded("chosen", "rejected")
        if self.objective == "rm" and MARGIN in columns:
            device = tensors["input_ids"].device
            tensors[MARGIN] = torch.tensor(columns[MARGIN](), dtype=torch.float32, device=device)
        return tensors
