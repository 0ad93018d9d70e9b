"""TRL's collators for `FlatRows`: the same batches, padded from flat ids.

They replace TRL's own collators, never one that the user passes. Rows that are not `FlatRows`, that are empty, or that
have null values fall back to TRL's method. So does everything if the first batch of some columns, which is made in both
ways, differs; if the collator's code is not known, batches of 64 rows are made in both ways.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer, sft_trainer

from gpuload.core.arrays import Ragged, appended, offsets_of
from gpuload.core.options import Truncation
from gpuload.engines.host.packs import IGNORED
from gpuload.integrations.comparison import ROWS, comparable, log_equal
from gpuload.integrations.core import log_fallback, release_of
from gpuload.integrations.known_code import change
from gpuload.integrations.processors import processor_change
from gpuload.integrations.trl.columns import SIDES
from gpuload.integrations.trl.contract import KNOWN, order_problem
from gpuload.integrations.trl.rows import FlatDataset, FlatRows

logger = logging.getLogger("gpuload.integrations.trl")

ORDER_PROBLEM = order_problem(Dataset)

Batch = dict[str, Any]


def use_flat_batches(trainer: Any) -> None:
    """Gives a trainer with TRL's own collator one for `FlatRows`, and datasets that have them."""
    stock = trainer.data_collator
    kinds = (FlatSFT, FlatDPO, FlatRM, FlatKTO, FlatTextsOfVision)
    kind = {flat.__bases__[1]: flat for flat in kinds}.get(type(stock))
    if kind is None and not isinstance(stock, _Flat):
        return
    if ORDER_PROBLEM:
        log_fallback(logger, "TRL's collator", ORDER_PROBLEM)
        return
    if kind is not None:
        trainer.data_collator = kind(**{field.name: getattr(stock, field.name) for field in dataclasses.fields(stock)})
    trainer.train_dataset, held_out = FlatDataset.of(trainer.train_dataset), trainer.eval_dataset
    if isinstance(held_out, dict):
        trainer.eval_dataset = {name: FlatDataset.of(dataset) for name, dataset in held_out.items()}
    else:
        trainer.eval_dataset = FlatDataset.of(held_out)


def as_collated(trainer: Any, dataset: Any) -> Any:
    """A dataset that has the rows which the trainer's collator takes."""
    return FlatDataset.of(dataset) if isinstance(getattr(trainer, "data_collator", None), _Flat) else dataset


def padded(rows: Ragged, fill: int, multiple: int | None) -> torch.Tensor:
    """(B, longest row) int64: rows padded on the right, to a width that is a multiple of a number."""
    width = int(rows.lengths.max())
    width += -width % (multiple or 1)
    made = np.full((len(rows), width), fill, np.int64)
    made[np.arange(width) < rows.lengths[:, None]] = rows.values  # row-major order of the mask is that of the ids
    return torch.from_numpy(made)


def _filled(rows: Ragged, value: int) -> Ragged:
    """Rows of the same lengths."""
    return Ragged(np.full(len(rows.values), value, np.int32), rows.offsets)


def _with_mask(ids: Ragged, fill: int, multiple: int | None) -> Batch:
    """Rows of ids, and where they are not padding."""
    return {"input_ids": padded(ids, fill, multiple), "attention_mask": padded(_filled(ids, 1), 0, multiple)}


class _Flat:
    """A collator that makes batches of `FlatRows` itself, and others as the class after it."""

    trusted = True

    @property
    def _agreed(self) -> "dict[frozenset[str], frozenset[str]]":
        """Columns of rows → values of a batch, which was made in both ways: TRL before 1.16 has no bounds of sequences
        in a batch without padding."""
        agreed: dict[frozenset[str], frozenset[str]] = vars(self).setdefault("agreed", {})
        return agreed

    def torch_call(self, examples: Any) -> Batch:
        made = self.flat(examples) if self.trusted and isinstance(examples, FlatRows) else None
        if made is None:
            return self._stock(examples)
        if (names := self._agreed.get(examples.names)) is None:
            return self._compared(made, examples)
        return {name: value for name, value in made.items() if name in names}

    def _stock(self, examples: Any) -> Batch:
        made: Batch = super().torch_call(list(examples))  # type: ignore[misc]
        return made

    def _compared(self, made: Batch, examples: FlatRows) -> Batch:
        """TRL's batch, with which ours is compared: with enough rows of these columns, TRL makes no more of them."""
        expected = self._stock(examples)
        changed = self._change()
        counts: Counter[frozenset[str]] = vars(self).setdefault("counts", Counter())
        counts[examples.names] += len(examples)
        made = {name: value for name, value in made.items() if name in expected}
        self.trusted = list(made) == list(expected) and comparable(made) == comparable(dict(expected))
        if not self.trusted:
            difference = "the first batch differs from its batch"
            log_fallback(logger, "TRL's collator", f"{changed}, and a batch differs" if changed else difference)
        elif changed is None or counts[examples.names] >= ROWS:
            self._agreed[examples.names] = frozenset(expected)
            if changed is not None:
                log_equal(logger, changed, counts[examples.names])
        return expected

    def _change(self) -> str | None:
        """Why more rows than those of the first batch are compared; None if they are not."""
        return change(release_of("trl", "TRL"), KNOWN, super().torch_call)  # type: ignore[misc]

    def flat(self, rows: FlatRows) -> Batch | None:
        """The batch, or None for rows that TRL has to collate."""
        raise NotImplementedError


class FlatSFT(_Flat, sft_trainer.DataCollatorForLanguageModeling):  # type: ignore[misc]
    """The collator of `SFTTrainer`."""

    def flat(self, rows: FlatRows) -> Batch | None:
        names = [name for name in ("input_ids", "labels", "seq_lengths") if name in rows.names]
        found = rows.ids(*names)
        if found is None or names[0] != "input_ids":
            return None
        columns = dict(zip(names, found, strict=True))
        ids, packs = columns["input_ids"], columns.get("seq_lengths")
        labels = columns.get("labels", ids)
        # A row is one document, or a pack of several. These are not empty, and fill the pack, if TRL has made them.
        bounds = ids.offsets if packs is None else offsets_of(packs.values)
        filled = packs is None or (packs.values.all() and np.array_equal(bounds[packs.offsets], ids.offsets))
        if not filled or not np.array_equal(labels.offsets, ids.offsets):
            return None
        positions = Ragged(Ragged(ids.values, bounds).positions, ids.offsets)
        fill, multiple = self.pad_token_id, self.pad_to_multiple_of
        if self.padding_free:
            return _one_row(_joined(ids), _joined(labels), _joined(positions), fill, multiple)
        made = {"input_ids": padded(ids, fill, multiple), "labels": padded(labels, IGNORED, multiple)}
        if self.return_position_ids:
            made["position_ids"] = padded(positions, 0, multiple)
        return made | {"attention_mask": padded(_filled(ids, 1), 0, multiple)}


class FlatTextsOfVision(_Flat, sft_trainer.DataCollatorForVisionLanguageModeling):  # type: ignore[misc]
    """The collator of `SFTTrainer` for data with images, of which `null_images.py` has given ids to conversations
    without any. Processors say which tokens stand for images, some of them: none."""

    def flat(self, rows: FlatRows) -> Batch | None:
        found = rows.ids("input_ids", "labels")
        if found is None:
            return None
        tokenizer, multiple = self.processor.tokenizer, self.pad_to_multiple_of
        if self.max_length is not None:
            found = [each.truncate(self.max_length, tokenizer.truncation_side) for each in found]
        ids, labels = found
        made = _with_mask(ids, tokenizer.pad_token_id, multiple)
        made |= {name: torch.zeros_like(made["input_ids"]) for name in ("token_type_ids", "mm_token_type_ids")}
        return made | {"labels": padded(labels, IGNORED, multiple)}

    def _change(self) -> str | None:
        return processor_change(self.processor)


def _joined(rows: Ragged) -> Ragged:
    """All rows as one."""
    return Ragged(rows.values, rows.offsets[[0, -1]])


def _one_row(ids: Ragged, labels: Ragged, positions: Ragged, fill: int, multiple: int | None) -> Batch:
    """A batch without padding between documents. Each value of padding at its end counts as a document, as in TRL."""
    made: Batch = {"input_ids": padded(ids, fill, multiple), "labels": padded(labels, IGNORED, multiple)}
    made["position_ids"] = padded(positions, 0, multiple)
    first = made["position_ids"][0] == 0
    made["labels"][0, first] = IGNORED
    bounds = torch.cat([first.nonzero().flatten(), torch.tensor([len(first)])]).to(torch.int32)
    made["cu_seq_lens_q"] = made["cu_seq_lens_k"] = bounds
    made["max_length_q"] = made["max_length_k"] = int(bounds.diff().max())
    return made | {"seq_idx": (first.cumsum(0) - 1).to(torch.int32)[None]}


class FlatDPO(_Flat, dpo_trainer.DataCollatorForPreference):  # type: ignore[misc]
    """The collator of `DPOTrainer`."""

    def flat(self, rows: FlatRows) -> Batch | None:
        found = rows.ids("prompt_ids", "chosen_ids", "rejected_ids")
        if found is None or self.truncation_mode not in SIDES:
            return None
        made = _sequences(found[0], found[1:], self.max_length, SIDES[self.truncation_mode], self)
        names = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name in rows.names]
        return made if made is None else made | {name: rows.numbers(name) for name in names}


def _sequences(
    prompts: Ragged, answers: Sequence[Ragged], limit: int | None, side: Truncation, collator: Any
) -> Batch | None:
    """Prompts, each with its answers: all first answers, then all second ones. Sequences over the limit, if any, are
    truncated at one `side`."""
    if limit is not None and limit < 1:
        return None
    ids = Ragged.concatenate([appended(prompts, each) for each in answers])
    mask = Ragged.concatenate([appended(_filled(prompts, 0), _filled(each, 1)) for each in answers])
    if limit is not None:
        ids, mask = ids.truncate(limit, side), mask.truncate(limit, side)
    multiple = collator.pad_to_multiple_of
    return _with_mask(ids, collator.pad_token_id, multiple) | {"completion_mask": padded(mask, 0, multiple)}


class FlatRM(_Flat, reward_trainer.DataCollatorForPreference):  # type: ignore[misc]
    """The collator of `RewardTrainer`."""

    def flat(self, rows: FlatRows) -> Batch | None:
        found = rows.ids("chosen_ids", "rejected_ids")
        if found is None:
            return None
        made = _with_mask(Ragged.concatenate(found), self.pad_token_id, self.pad_to_multiple_of)
        return made | ({"margin": rows.numbers("margin", torch.float)} if "margin" in rows.names else {})


class FlatKTO(_Flat, kto_trainer.DataCollatorForUnpairedPreference):  # type: ignore[misc]
    """The collator of `KTOTrainer`."""

    def flat(self, rows: FlatRows) -> Batch | None:
        answers = {"": "completion_ids", "KL_": "KL_completion_ids"}
        answers = {prefix: name for prefix, name in answers.items() if name in rows.names}
        found = rows.ids("prompt_ids", *answers.values())
        if found is None or "label" not in rows.names:
            return None
        made: Batch = {}
        for prefix, each in zip(answers, found[1:], strict=True):
            part = _sequences(found[0], [each], self.max_length, "right", self)
            if part is None:
                return None
            made |= {prefix + name: values for name, values in part.items()}
        scores = [name for name in ("ref_logps", "ref_KL_logps", "label") if name in rows.names]
        return made | {name: rows.numbers(name) for name in scores}
