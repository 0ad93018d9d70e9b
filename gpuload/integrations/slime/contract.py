"""What the data source here uses of slime. slime has no interface for data sets, so names are checked at each start."""

import inspect
from collections.abc import Mapping
from typing import Any

DATASET_PARAMETERS = (
    "path", "tokenizer", "processor", "max_length", "prompt_key", "multimodal_keys", "label_key", "tool_key",
    "metadata_key", "seed", "apply_chat_template", "apply_chat_template_kwargs",
)  # fmt: skip
"""Parameters of slime's `Dataset`: what decides which samples there are."""

SAMPLE_FIELDS = ("prompt", "tokens", "multimodal_inputs", "response_length", "label", "reward", "loss_mask", "metadata")

MODULES = ("slime.utils.data", "slime.utils.types")


def contract_problem(modules: Mapping[str, Any]) -> str | None:
    """Why this slime is not supported; None if it is.

    Args:
        modules: name → module, for each of `MODULES`.
    """
    data, types = (modules[name] for name in MODULES)
    found = tuple(inspect.signature(data.Dataset).parameters)
    if found != DATASET_PARAMETERS:
        return f"slime's Dataset has the parameters {', '.join(found)}"
    if not hasattr(data, "_parse_generalized_path"):
        return "slime.utils.data has no _parse_generalized_path"
    missing = [name for name in SAMPLE_FIELDS if name not in types.Sample.__dataclass_fields__]
    return f"slime's Sample has no {missing[0]}" if missing else None
