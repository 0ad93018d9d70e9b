"""The supported version of TRL, and what the trainers here use of it that is private.

`_prepare_dataset` may change in any release. Names and parameters are checked at import; what the method makes of
rows is checked at each preparation, on a sample, and what the collators make of them on the first batch.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.integrations.core import is_supported

SUPPORTED = "1.16"

_SHARED = ("self", "dataset", "processing_class", "args", "dataset_name")
PARAMETERS = {
    "SFTTrainer": (*_SHARED[:4], "packing", "formatting_func", "dataset_name"),
    "DPOTrainer": _SHARED,
    "RewardTrainer": _SHARED,
    "KTOTrainer": _SHARED,
}
"""Trainer → the parameters of its `_prepare_dataset`."""

_FUNCTIONS = {
    "trl.data_utils": ("extract_prompt", "pack_dataset", "unpair_preference_dataset"),
    "trl.trainer.utils": ("global_then_local_main_first",),
}

COLLATORS = {
    "trl.trainer.sft_trainer": (
        "DataCollatorForLanguageModeling",
        ("pad_token_id", "padding_free", "return_position_ids", "pad_to_multiple_of", "return_tensors"),
    ),
    "trl.trainer.dpo_trainer": (
        "DataCollatorForPreference",
        ("pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"),
    ),
    "trl.trainer.reward_trainer": (
        "DataCollatorForPreference",
        ("pad_token_id", "pad_to_multiple_of", "return_tensors"),
    ),
    "trl.trainer.kto_trainer": (
        "DataCollatorForUnpairedPreference",
        ("pad_token_id", "max_length", "pad_to_multiple_of", "return_tensors"),
    ),
}
"""Module → its collator, and the fields that it has."""

MODULES = ("trl", *_FUNCTIONS, *COLLATORS)


def row_numbers(dataset: Any, rows: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where rows of a dataset are in `dataset.data`, its table.

    A dataset that was shuffled or selected from has a table with more rows, or in another order. There is no public
    name for that order, so `order_problem` checks this one.

    Args:
        rows: (B,) their numbers in the dataset.
    """
    numbers = np.asarray(rows, np.int64)
    order = dataset._indices
    return numbers if order is None else order.column(0).take(pa.array(numbers)).to_numpy().astype(np.int64)


def order_problem(kind: Any) -> str | None:
    """Why rows of a dataset cannot be found in its table; None if they can.

    Args:
        kind: `datasets.Dataset`.
    """
    # Another order, consecutive rows, rows of a part, and all.
    whole = kind.from_dict({"row": list(range(8))})
    orders = {"select": whole.select([5, 0, 3]), "shuffle": whole.shuffle(seed=0).select([2, 6, 4])}
    orders |= {"slice": whole.select(range(2, 6)), "": whole}
    for name, dataset in orders.items():
        try:
            numbers = row_numbers(dataset, np.arange(len(dataset)))
            found = dataset.data.column("row").take(pa.array(numbers)).to_pylist()
        except Exception as error:  # a private name has another meaning
            return f"datasets has another way to {name or 'keep'} rows ({type(error).__name__}: {error!s:.100})"
        if found != dataset.with_format(None)["row"][:]:
            return f"datasets has another way to {name or 'keep'} rows"
    return None


def contract_problem(version: str, modules: Mapping[str, Any]) -> str | None:
    """Why this TRL is not supported; None if it is.

    Args:
        version: of TRL.
        modules: name → module, for each of `MODULES`.
    """
    if not is_supported(version, SUPPORTED, SUPPORTED):
        return f"TRL {version} is installed"
    for trainer, expected in PARAMETERS.items():
        method = getattr(getattr(modules["trl"], trainer, None), "_prepare_dataset", None)
        found = tuple(inspect.signature(method).parameters) if method else ()
        if found != expected:
            return f"{trainer}._prepare_dataset has the parameters {', '.join(found) or '(none)'}"
    for module, names in _FUNCTIONS.items():
        for name in names:
            if not hasattr(modules[module], name):
                return f"{module} has no {name}"
    for module, (name, expected) in COLLATORS.items():
        collator = getattr(modules[module], name, None)
        found = tuple(field.name for field in dataclasses.fields(collator)) if collator else ()
        if found != expected:
            return f"{module}.{name} has the fields {', '.join(found) or '(none)'}"
    return None
