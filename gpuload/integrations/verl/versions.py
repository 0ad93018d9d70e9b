"""The supported versions of verl, and what differs between them.

The classes of this package override methods of verl's classes, which change between releases.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from gpuload.core.errors import GpuloadError
from gpuload.integrations.core import is_supported

OLDEST = "0.7.1"
NEWEST = "0.9.1"


def check_verl_version() -> None:
    """Check that the installed verl is supported.

    Raises:
        GpuloadError: it is not.
    """
    import verl

    if not is_supported(verl.__version__, OLDEST, NEWEST):
        raise GpuloadError(
            f"gpuload.integrations.verl supports verl {OLDEST} to {NEWEST}, but verl {verl.__version__} is installed: "
            "install one of the supported versions, or use verl's own classes"
        )


def system_and_generation_prompt(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of the default system prompt and of the generation prompt, as verl's SFT dataset computes them.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: verl's `apply_chat_template_kwargs`, which verl 0.7 does not use here.
    """
    try:
        from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation as extract
    except ImportError:  # before verl 0.9
        from verl.utils.chat_template import extract_system_prompt_and_generation as extract
    used = kwargs if len(inspect.signature(extract).parameters) > 1 else {}
    prompts: tuple[list[int], list[int]] = extract(tokenizer, **used)
    return prompts
