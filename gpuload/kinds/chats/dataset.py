"""ChatDataset: conversations, or other text to train on, with labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged
from gpuload.core.errors import OptionError
from gpuload.core.marks import loss_weights, split
from gpuload.core.options import Padding, Trainer
from gpuload.core.words import counted
from gpuload.dataset.arrow import lists, names_of, row_reader
from gpuload.dataset.batch import RowBatch
from gpuload.dataset.loader import PackLoader, PromptLoader
from gpuload.dataset.rows import Loaded, Made, Numbers, Rows, Values
from gpuload.dataset.trainer_columns import CHATS, arrays, check_columns, columns_of, fields
from gpuload.engines.batches import BatchLayout
from gpuload.engines.host.packs import IGNORED
from gpuload.packing import Plan, batch_rows, pack
from gpuload.packing.packs import Packing
from gpuload.packing.plan import check_counts, check_flags, whole_rows
from gpuload.sources.columns import Columns

LAYOUT = BatchLayout("right", ("input_ids", "attention_mask", "position_ids", "labels"))


class ChatDataset(Rows):
    """Tokenized rows with a loss mask, and the other columns of their files. Made by `gpuload.load_chats`.

    A map-style `torch.utils.data.Dataset`. A row is a dict with these keys, for L tokens:

    - `input_ids`: the token ids, a list of int.
    - `labels`: the same, and -100 for tokens without loss.
    - `loss_weight`: if messages have weights other than 0 and 1, the weight of each token's loss, and 0 for tokens
      without loss, a list of float.
    - Every other column of the files, as Python objects.

    `batch` and `loader` give tensors `(B, L)` on the load's device instead, padded on the right.

    Attributes:
        report: What the load did; `print` it.
        options: The options of the load.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    def __init__(self, loaded: Loaded, layout: BatchLayout):
        super().__init__(loaded, layout)
        self._weights = np.array(layout.weights, np.float32)

    def __repr__(self) -> str:
        columns = "".join(f", {name}" for name in self.passed_through.names)
        tokens = counted(self._lengths.sum(), "tokens")
        return f"ChatDataset({counted(len(self), 'rows')}, {tokens}, {self.loss_tokens:,} with loss{columns})"

    @property
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding and not truncated: `values`, int32, and `offsets`, int64 `(n + 1,)`."""
        return split(self._store.to_host())[0]

    @property
    def column_names(self) -> list[str]:
        return names_of(fields(columns_of("trl", weighted=len(self._weights) > 0)), self.passed_through)

    def _parts(self, numbers: Numbers) -> dict[str, Ragged]:
        return {"conversation": self._tokens(whole_rows(numbers, self._lengths[numbers]))}

    @property
    def loss_mask(self) -> Ragged:
        """Which of these ids have loss: `values`, bool, and the same `offsets`."""
        return split(self._store.to_host())[1]

    @property
    def loss_weights(self) -> Ragged:
        """The weight of the loss of each of these ids: `values`, float32, 0 for ids without loss; and `offsets`."""
        tokens = self._store.to_host()
        return Ragged(self._weight_of(tokens), tokens.offsets)

    def _weight_of(self, tokens: Ragged) -> np.ndarray[Any, Any]:
        return loss_weights(tokens, self._weights if len(self._weights) else np.ones(1, np.float32))

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with loss."""
        return int(self._sizes[1].sum())

    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        tokens = self._tokens(self._plan(numbers))
        ids, loss = split(tokens)
        made = {"input_ids": ids, "labels": Ragged(np.where(loss.values, ids.values, IGNORED), ids.offsets)}
        if len(self._weights):
            made["loss_weight"] = Ragged(self._weight_of(tokens), ids.offsets)
        return {name: values.to_lists() for name, values in made.items()}

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "longest") -> RowBatch:
        """Return a batch of B rows.

        Examples:
            >>> chats.batch([0, 1])["labels"]
            tensor([[ 19789,   4244, 151645],
                    [   603,   151645,   -100]])

        Args:
            rows: Row numbers `(B,)`; negative numbers count from the end.
            padding: Width L of the tensors: `"longest"` for the longest row of the batch, `"max_length"` for
                `max_length`.

        Returns:
            A mapping: `input_ids`, `attention_mask`, `position_ids` and `labels`, int64 tensors `(B, L)` padded on the
            right, and an object array `(B,)` for each other column, made when it is first read. Labels of padding and
            of tokens without loss are -100. If messages have weights other than 0 and 1, also `loss_weight`, float32
            `(B, L)`, 0 where the label is -100.

        Raises:
            IndexError: A row number is out of range.
        """
        return self._batch(rows, padding)

    def loader(
        self,
        batch_size: int | None = None,
        *,
        packing: Packing | None = None,
        pack_length: int | None = None,
        max_tokens: int | None = None,
        padded: bool = True,
        group_by_length: bool = False,
        **settings: Any,
    ) -> PromptLoader | PackLoader:
        """Return an iterable over batches, with a state that can be saved and restored.

        Examples:
            >>> len(chats.loader(batch_size=1))
            2

        Args:
            batch_size: Rows per batch; with `packing`, packs per batch.
            packing: Batches are packs of `pack_length` tokens: `"bfd"` (best fit: the fewest packs), `"bfd_split"` (the
                same, and longer rows are split), `"wrapped"` (rows end to end), or the packs of TRL: `"trl"`,
                `"trl_bfd_split"`, `"trl_wrapped"`. See `gpuload.packing.pack`.
            pack_length: Tokens of a pack; None for `max_length`.
            max_tokens: Instead of `batch_size`: as many rows as have this many tokens together, padding included if
                `padded`.
            padded: Pad rows on the right; otherwise a batch is one flat row of them, as with `packing`.
            group_by_length: Rows of a batch have similar lengths.
            **settings: `shuffle`, `seed`, `rank`, `world_size` and `drop_last`, see `PromptLoader`. And `padding`, for
                batches that are not planned: `"longest"` or `"max_length"`.

        Returns:
            The loader. A flat batch of T tokens has `input_ids`, `labels` and `position_ids`, int64 `(1, T)`, positions
            and `seq_idx`, int32 `(1, T)`, counted per row, and int32 `cu_seq_lens_q` and `cu_seq_lens_k` with
            `max_length_q` and `max_length_k`, as flash attention takes them. The first label of each row is -100. If
            messages have weights other than 0 and 1, also `loss_weight`, float32 `(1, T)`, 0 where the label is -100.

        Raises:
            OptionError: A value is invalid, or `drop_last` leaves no batch.
        """
        check_flags(padded=padded, group_by_length=group_by_length)
        if packing is None and pack_length is not None:
            raise OptionError("pack_length is for packs: pass packing too")
        if packing is None and max_tokens is None and not group_by_length and padded:
            if batch_size is None:
                raise OptionError("loader: pass batch_size, or max_tokens")
            return self._loader(batch_size, {"padding": "longest"} | settings)
        chosen = {"shuffle": self.options.shuffle, "seed": self.options.seed or 0} | settings
        ranks = {name: chosen.pop(name) for name in ("rank", "world_size", "drop_last") if name in chosen}
        if unknown := set(chosen) - {"shuffle", "seed"}:
            raise OptionError(f"loader: {', '.join(sorted(unknown))}: not an option of planned batches")
        check_flags(shuffle=chosen["shuffle"], drop_last=ranks.get("drop_last"))
        plan: Callable[[int], Plan]
        made: Callable[[Plan, Any], Any]
        if packing is not None:
            if batch_size is None or max_tokens is not None or group_by_length:
                raise OptionError("loader: packing takes batch_size, and neither max_tokens nor group_by_length")
            size = self._pack_size(pack_length)
            plan = partial(self._packs, size, packing, **chosen)
            made, per_batch = self._flat, batch_size
            about: dict[str, Any] = {"packing": packing, "pack_length": size}
        else:
            about = {"rows": batch_size, "max_tokens": max_tokens, "padded": padded, "group_by_length": group_by_length}
            if group_by_length:  # then the plan depends on the ranks, and another number of them cannot resume
                about["planned_ranks"] = ranks.get("world_size", 1)
            plan = partial(
                self._row_batches,
                batch_size=batch_size,
                max_tokens=max_tokens,
                padded=padded,
                group_by_length=group_by_length,
                world_size=ranks.get("world_size", 1),
                **chosen,
            )
            made, per_batch = self._padded_pack if padded else self._flat, 1
        return PackLoader(self, plan, made, per_batch, about | chosen, **ranks)

    def to_arrow(
        self,
        *,
        packing: Packing | None = None,
        pack_length: int | None = None,
        columns: Sequence[str] | None = None,
        trainer: Trainer = "trl",
    ) -> pa.RecordBatchReader:
        """Return all rows, or packs of them, as Arrow record batches.

        They have the columns of data that a trainer has prepared itself. Batches are made one after the other.

        Examples:
            >>> import gpuload, pyarrow as pa
            >>> from gpuload.demo_data import demo_files
            >>> _, tokenizer = demo_files()
            >>> chats = gpuload.load_chats(pa.table({"text": ["one two", "three"], "n": [1, 2]}), tokenizer)
            >>> chats.to_arrow(columns=["n"]).read_all().to_pylist()[1]
            {'input_ids': [27856, 151645], 'labels': [27856, 151645], 'n': 2}
            >>> chats.to_arrow(packing="bfd", pack_length=8).read_all()["seq_lengths"].to_pylist()
            [[3, 2]]

        Args:
            packing: Packs instead of rows, as for `loader`, without shuffling.
            pack_length: Tokens of a pack; None for `max_length`.
            columns: Which other columns of the files to add; None for all. Packs have none.
            trainer: Whose columns the rows have. Packs, and other columns of the files, are for `"trl"`.

        Returns:
            The batches. For `"trl"`: `input_ids` and `labels`, lists of int32, with -100 as label of tokens without
            loss, and the other columns; a pack has `seq_lengths` too, the number of tokens of each of its pieces. If
            messages have weights other than 0 and 1, `loss_weight` follows, lists of float32, which is not TRL's. For
            `"llamafactory"` and `"axolotl"`: `input_ids`, `attention_mask` (int8) and `labels`. For `"skyrl"`,
            `"areal"` and `"megatron"`: `input_ids` and `loss_mask` (int8), which is 0 for the first token of each row.

        Raises:
            OptionError: A value is invalid, or messages have weights that the trainer does not read.
            DataError: Files have other types in a column, and no type has all of its values.
        """
        check_columns(trainer, list(CHATS), columns)
        own = columns_of(trainer, weighted=len(self._weights) > 0)
        if packing is None:
            if pack_length is not None:
                raise OptionError("pack_length is for packs: pass packing too")
            plan = self._plan(np.arange(len(self)))
            names = columns if trainer == "trl" else []
            return row_reader(plan.tokens, fields(own), partial(self._arrays, own, plan), self.passed_through, names)
        if trainer != "trl":
            own_packs = (
                "has indexes of packs, which save_to_disk writes" if trainer == "megatron" else "packs rows itself"
            )
            raise OptionError(f"packing={packing!r}: packs are for TRL; {trainer} {own_packs}")
        if columns:
            raise OptionError(f"columns={list(columns)!r}: a pack has several rows, so it has none of their columns")
        size = self._pack_size(pack_length)
        plan = self._packs(size, packing, 0)

        def make(packs: Numbers) -> list[pa.Array]:
            # Labels are those of the rows, also for the first token of a piece: TRL's collator ignores it.
            pieces = plan.take(packs)
            return [*self._arrays(own, plan, packs), lists(pieces.lengths.astype(np.int32), pieces.offsets)]

        names = [*fields(own), pa.field("seq_lengths", pa.list_(pa.int32()))]
        return row_reader(plan.tokens, names, make, Columns([]), [])

    def _arrays(self, names: Sequence[str], plan: Plan, packs: Numbers) -> list[pa.Array]:
        """The tokens of some packs, in some columns: one list for each of them."""
        tokens = self._tokens(plan.take(packs))
        weights = self._weight_of(tokens) if len(self._weights) else None
        return arrays(names, *split(tokens), tokens.offsets, weights)

    @cached_property
    def _kept(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(n,) where the tokens of each row begin that truncation keeps, and how many there are."""
        kept = np.minimum(self._lengths, self.options.max_prompt_length)
        return (self._lengths - kept) * (self.options.truncation == "left"), kept

    def _pack_size(self, given: int | None) -> int:
        """The tokens of a pack."""
        size = self.options.max_prompt_length if given is None else given
        check_counts(pack_length=(size, 1))
        return size

    def _packs(self, size: int, packing: Packing, epoch: int, **order: Any) -> Plan:
        first, lengths = self._kept
        return _moved(pack(lengths, size, packing, epoch=epoch, **order), first)

    def _row_batches(self, epoch: int, **settings: Any) -> Plan:
        first, lengths = self._kept
        return _moved(batch_rows(lengths, epoch=epoch, **settings), first)

    def _flat(self, plan: Plan, packs: Any) -> RowBatch:
        pieces = plan.take(packs)
        return RowBatch(self._batches.packed(pieces, partial(self._tokens, pieces)))

    def _padded_pack(self, plan: Plan, packs: Any) -> RowBatch:
        return self.batch(plan.take(packs).rows)

    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        return self._padded(self._plan(numbers), padding)


def _moved(plan: Plan, first: np.ndarray[Any, Any]) -> Plan:
    """A plan of rows whose first tokens are left out."""
    return replace(plan, first=plan.first + first[plan.rows])
