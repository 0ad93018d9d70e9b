"""Tokenizers given by name: a path, or the id of a model on the Hugging Face hub."""

import os

from gpuload.reference.template_call import describe_error

_SECONDS = 10.0  # to wait for the first answer of the hub


def is_path(name: str) -> bool:
    """Whether a name can only be a path: ids of models have one slash at most."""
    return os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith(os.sep)


def hub_problem() -> str | None:
    """Why the hub cannot be reached; None if it can, or is not to be asked.

    transformers would try each file of a tokenizer for half a minute and more before it looks for downloaded ones.
    """
    try:
        from huggingface_hub import constants, get_session
    except ImportError:
        return None
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # those of its HTTP library, which is not the same in all versions
        return f"{constants.ENDPOINT}: {describe_error(error):.200}"
    return None
