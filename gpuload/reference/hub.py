"""Tokenizers given by name: a path, or the id of a model on the Hugging Face hub."""

import os
import threading
import time

from gpuload.reference.template_call import describe_error

_SECONDS = 10.0  # to wait for the first answer of the hub
_REMEMBERED_SECONDS = 600.0  # so that several loads wait once; yet a network that comes back needs no new process

_known: dict[str, tuple[float, str | None]] = {}  # endpoint → when it was asked, and why it cannot be reached
_asking = threading.Lock()


def is_path(name: str) -> bool:
    """Whether a name can only be a path: ids of models have one slash at most."""
    return os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith(os.sep)


def is_closed(directory: str) -> bool:
    """Whether this user may not read a directory, which transformers then takes for one that is not there."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def hub_problem() -> str | None:
    """Why the hub cannot be reached; None if it can, or is not to be asked.

    The answer is remembered for some minutes. transformers would try each file of a tokenizer for half a minute and
    more before it looks for downloaded ones.
    """
    try:
        from huggingface_hub import constants, get_session
    except ImportError:
        return None
    if constants.HF_HUB_OFFLINE:
        return None
    endpoint = constants.ENDPOINT
    with _asking:
        asked, found = _known.get(endpoint, (None, None))
        if asked is None or time.monotonic() - asked > _REMEMBERED_SECONDS:
            found = None
            try:
                get_session().head(endpoint, timeout=_SECONDS)
            except Exception as error:  # those of its HTTP library, which is not the same in all versions
                found = f"{endpoint}: {describe_error(error):.200}"
            _known[endpoint] = time.monotonic(), found
        return found
