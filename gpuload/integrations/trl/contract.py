"""What the trainers here use of TRL that is private, and which releases of it are known.

`_prepare_dataset` may change in any release. Names and parameters are checked at import, what the method makes of rows
at each preparation, on a sample, and what the collators make of them on the first batch. If their code is not known,
rows of every shape are prepared in both ways, with all steps, and batches of 64 rows are made in both.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gpuload.integrations.known_code import Table, problem

KNOWN: Table = {
    "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset": {
        "db7e98b38b29e1da": "1.14.2",
        "82fb6bbb633f4228": "1.15.0, 1.16.0",
    },
    "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call": {
        "e23995e904b1088e": "1.14.2, 1.15.0",
        "5666a46c47f71b4d": "1.16.0",
    },
    "trl.trainer.dpo_trainer:DPOTrainer._prepare_dataset": {"70a5807a84523a57": "1.14.2, 1.15.0, 1.16.0"},
    "trl.trainer.dpo_trainer:DataCollatorForPreference.torch_call": {"ff97371df3ec3662": "1.14.2, 1.15.0, 1.16.0"},
    "trl.trainer.reward_trainer:RewardTrainer._prepare_dataset": {"c68eaa6aadcfd73c": "1.14.2, 1.15.0, 1.16.0"},
    "trl.trainer.reward_trainer:DataCollatorForPreference.torch_call": {"a30dc6289546c847": "1.14.2, 1.15.0, 1.16.0"},
    "trl.trainer.kto_trainer:KTOTrainer._prepare_dataset": {"95883e235be6681e": "1.14.2, 1.15.0, 1.16.0"},
    "trl.trainer.kto_trainer:DataCollatorForUnpairedPreference.torch_call": {
        "428e03ff09223f04": "1.14.2, 1.15.0, 1.16.0",
    },
}
"""`python -m gpuload.integrations.known_code trl` prints the digests of the installed TRL."""


class Trainer(NamedTuple):
    """What is used of a trainer of TRL."""

    module: str  # its module, with the collator
    parameters: tuple[str, ...]  # of its `_prepare_dataset`
    collator: str  # the name of its collator
    fields: tuple[str, ...]  # of the collator


_SHARED = ("self", "dataset", "processing_class", "args")
_PADDED = ("pad_to_multiple_of", "return_tensors")

TRAINERS = {
    "SFTTrainer": Trainer(
        "trl.trainer.sft_trainer",
        (*_SHARED, "packing", "formatting_func", "dataset_name"),
        "DataCollatorForLanguageModeling",
        ("pad_token_id", "padding_free", "return_position_ids", *_PADDED),
    ),
    "DPOTrainer": Trainer(
        "trl.trainer.dpo_trainer",
        (*_SHARED, "dataset_name"),
        "DataCollatorForPreference",
        ("pad_token_id", "max_length", "truncation_mode", *_PADDED),
    ),
    "RewardTrainer": Trainer(
        "trl.trainer.reward_trainer",
        (*_SHARED, "dataset_name"),
        "DataCollatorForPreference",
        ("pad_token_id", *_PADDED),
    ),
    "KTOTrainer": Trainer(
        "trl.trainer.kto_trainer",
        (*_SHARED, "dataset_name"),
        "DataCollatorForUnpairedPreference",
        ("pad_token_id", "max_length", *_PADDED),
    ),
}

NAMES = {
    "trl.data_utils": ("extract_prompt", "maybe_convert_to_chatml", "pack_dataset", "unpair_preference_dataset"),
    "trl.trainer.utils": ("global_then_local_main_first",),
    **{trainer.module: (trainer.collator,) for trainer in TRAINERS.values()},
    "trl.trainer.sft_trainer": ("DataCollatorForLanguageModeling", "DataCollatorForVisionLanguageModeling"),
}
"""Module → what is used of it. Without one of these names, none of the trainers is replaced."""


def contract_problem(name: str, kind: Any, collator: Any) -> str | None:
    """Why TRL's class with this name, and its collator, are not replaced; None if they are."""
    used = TRAINERS[name]
    return problem(
        {
            f"{name}._prepare_dataset": (getattr(kind, "_prepare_dataset", None), used.parameters),
            f"{used.module}.{used.collator}": (collator, used.fields),
        }
    )


def row_numbers(dataset: Any, rows: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(B,) where rows of a dataset are in `dataset.data`, its table.

    A dataset that was shuffled or selected from has a table with more rows, or in another order. There is no public
    name for that order, so `order_problem` checks this one.
    """
    numbers = np.asarray(rows, np.int64)
    order = dataset._indices
    return numbers if order is None else order.column(0).take(pa.array(numbers)).to_numpy().astype(np.int64)


def order_problem(kind: Any) -> str | None:
    """Why rows of `datasets.Dataset` cannot be found in its table; None if they can."""
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
