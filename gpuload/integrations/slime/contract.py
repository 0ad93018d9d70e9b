"""What the data source here uses of slime. slime has no interface for data sets, so names are checked at each start."""

from typing import Any

from gpuload.integrations.known_code import Table, problem

KNOWN: Table = {
    "slime.utils.data:Dataset.__init__": {"ff0b458e35ad9416": "0.3.1"},
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.__init__": {"f64436e68bee629f": "0.3.1"},
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_loss_mask": {"2f4b9bdff58e8d9b": "0.3.1"},
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_response_lengths": {"6e588db197fa9eaa": "0.3.1"},
    "slime.rollout.sft_rollout:generate_rollout": {"2bef5e87c60e2b75": "0.3.1"},
}
"""`python -m gpuload.integrations.known_code slime` prints the digests of the installed slime."""

DATASET_PARAMETERS = (
    "path", "tokenizer", "processor", "max_length", "prompt_key", "multimodal_keys", "label_key", "tool_key",
    "metadata_key", "seed", "apply_chat_template", "apply_chat_template_kwargs",
)  # fmt: skip
"""Parameters of slime's `Dataset`: what decides which samples there are."""

SAMPLE_FIELDS = ("prompt", "tokens", "multimodal_inputs", "response_length", "label", "reward", "loss_mask", "metadata")

NAMES = {
    "slime.utils.data": ("Dataset", "_parse_generalized_path"),
    "slime.utils.types": ("Sample",),
    "slime.utils.processing_utils": ("load_tokenizer", "load_processor"),
}
"""Module → what is used of it."""

SFT_NAMES = {
    "slime.utils.mask_utils": (
        "MultiTurnLossMaskGenerator",
        "MultiTurnLossMaskGenerator.get_loss_mask",
        "MultiTurnLossMaskGenerator.get_response_lengths",
    ),
    "slime.rollout.sft_rollout": ("generate_rollout",),
}
"""The same for conversations."""


def contract_problem(dataset: Any, sample: Any) -> str | None:
    """Why this slime, with these classes, is not supported; None if it is."""
    missing = [name for name in SAMPLE_FIELDS if name not in sample.__dataclass_fields__]
    return problem({"slime's Dataset": (dataset, DATASET_PARAMETERS)}) or (
        f"slime's Sample has no {missing[0]}" if missing else None
    )
