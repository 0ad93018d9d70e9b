"""The columns of tokens that each trainer reads from a directory of prepared rows.

A trainer that finds these columns in a store of Hugging Face `datasets` neither renders nor tokenizes. Except for TRL,
the collators of these trainers pad every column that they find, or fail on it: such a store has no others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.errors import OptionError
from gpuload.core.options import Trainer, nearest
from gpuload.dataset.arrow import lists
from gpuload.engines.host.packs import IGNORED

CHATS: Mapping[Trainer, Sequence[str]] = {
    "trl": ("input_ids", "labels"),
    "llamafactory": ("input_ids", "attention_mask", "labels"),
    "axolotl": ("input_ids", "attention_mask", "labels"),
    "skyrl": ("input_ids", "loss_mask"),
    "areal": ("input_ids", "loss_mask"),
    "megatron": ("input_ids", "loss_mask"),
}
"""Trainer → its columns of rows for SFT."""

MASKS = frozenset(("attention_mask", "position_ids", "completion_mask", "assistant_masks", "seq_lengths"))
"""Columns that collators of TRL, of the versions that are supported, apply to the tokens of rows that have them."""

PAIRS: Sequence[Trainer] = ("trl", "llamafactory")  # trainers that read pairs for DPO
_TYPES = {"input_ids": pa.int32(), "labels": pa.int32(), "attention_mask": pa.int8(), "loss_mask": pa.int8()}
_TYPES |= {"loss_weight": pa.float32()}


def columns_of(trainer: Trainer, weighted: bool) -> Sequence[str]:
    """The columns of rows for SFT, the loss of whose tokens may be `weighted`: an `OptionError` if the trainer does not
    read weights."""
    if weighted and trainer != "trl":
        raise OptionError(
            f"trainer={trainer!r}: the messages have weights other than 0 and 1, which {trainer} cannot use with "
            "loss_on='marked': load them with loss_on='assistant' to ignore marks, or use the weights 0 and 1"
        )
    return (*CHATS[trainer], "loss_weight") if weighted else CHATS[trainer]


def fields(names: Sequence[str], prefix: str = "") -> list[pa.Field]:
    """The types of some columns of `CHATS`, with a prefix of their names."""
    return [pa.field(prefix + name, pa.list_(_TYPES[name])) for name in names]


def arrays(
    names: Sequence[str], ids: Ragged, loss: Ragged, offsets: RowNumbers, weights: np.ndarray | None = None
) -> list[pa.ListArray]:
    """The values of these columns, of m rows whose lists begin at `offsets` (m + 1,) in the ids.

    `loss` has one bool for each id; `weights`, float32, the weight of its loss, if that is among the columns.
    """
    made: dict[str, Callable[[], Any]] = {
        "loss_weight": lambda: weights,
        "input_ids": lambda: ids.values,
        "labels": lambda: np.where(loss.values, ids.values, np.int32(IGNORED)),
        "attention_mask": lambda: np.ones(len(ids.values), np.int8),
        "loss_mask": lambda: _loss_mask(loss.values, offsets),
    }
    return [lists(made[name](), offsets) for name in names]


def _loss_mask(loss: np.ndarray, offsets: RowNumbers) -> np.ndarray:
    """1 for tokens with loss, and 0 for others and for the first token of a row.

    Nothing predicts a first token, so labels leave it to the model to ignore its loss. Masks are used otherwise: AReaL
    rotates a mask by one token to the left, so that of the first token would be that of what follows the last one, and
    SkyRL takes the predictions of all tokens from the first with loss on, of which there would be one too few.
    """
    mask = loss.astype(np.int8)
    mask[offsets[:-1][offsets[:-1] < offsets[1:]]] = 0
    return mask


def check_columns(trainer: Trainer, known: Sequence[str], columns: Sequence[str] | None) -> None:
    """Checks for whom rows are made: for one of the `known` trainers, with further `columns` or without. An
    `OptionError` if the trainer is unknown, or reads no other columns, or if `columns` is a text."""
    if trainer not in known:
        raise OptionError(f"trainer={trainer!r}{nearest(str(trainer), set(known))}")
    if isinstance(columns, str):
        raise OptionError(f"columns={columns!r}: expected a list of names, such as [{columns!r}]")
    if trainer != "trl" and columns:
        raise OptionError(f"columns={list(columns)!r}: {trainer} reads no other columns")
