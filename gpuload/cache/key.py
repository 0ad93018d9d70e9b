"""The key of an entry: everything that decides the ids of a file, except for its content."""

import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpuload._version import __version__
from gpuload.core.backends import small_state
from gpuload.core.options import Options
from gpuload.engines.host.encode import needs_itself
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import Clock, dates, volatile_reason
from gpuload.tokenizer.tokenizers1 import tokenizers1_version

_PACKAGES = ("gigatoken", "jinja2", "msgspec", "pyarrow", "tokenizers", "transformers")


def uncacheable_reason(reference: Reference, clock: Clock | None) -> str | None:
    """Why no digest can identify the ids that this tokenizer returns, or None.

    Its class must be transformers' own, whose code a version identifies, and everything else must be plain data.
    """
    tokenizer, call = reference.tokenizer, reference.call
    kind = type(tokenizer)
    if reason := needs_itself(reference):
        return reason
    for owner in (kind, *(getattr(kind, name, kind) for name in _METHODS)):
        if owner.__module__.partition(".")[0] != "transformers":
            return f"{kind.__name__} has code from outside transformers ({owner.__qualname__})"
    if own := [name for name, value in vars(tokenizer).items() if callable(value)]:
        return f"{own[0]} was replaced on this {kind.__name__}"
    if reference.made is not None and (why := reference.made.problem()):
        return why
    if not reference.uses_template:
        return None
    if not reference.encodes_rendered_text:
        return "the template's arguments, or the tokenizer's class, change how text is encoded"
    for name, value in (("tools", call.tools), *call.kwargs.items()):
        if not is_plain(value):
            return f"{name} is not plain data"
    return volatile_reason(reference.template_text, clock)


_METHODS = ("apply_chat_template", "get_chat_template", "__call__", "_encode_plus")


def decides_ids(reference: Reference, options: Options, clock: Clock | None) -> bytes:
    """Everything except a file's content that its ids depend on."""
    return decides_later(reference, options, clock)()


def decides_later(reference: Reference, options: Options, clock: Clock | None) -> Callable[[], bytes]:
    """What makes `decides_ids` of the tokenizer as it is now: see `Reference.fingerprint_later`."""
    template = reference.template_text if reference.uses_template else None
    printed = dates(template, clock) if template is not None else None
    made = [] if reference.made is None else reference.made.decides()
    fingerprint = reference.fingerprint_later()

    def decides() -> bytes:
        parts = [*package_versions(), options.prompt_key, *made, fingerprint(), template, printed]
        return repr(parts).encode(errors="backslashreplace")

    return decides


def changeable(reference: Reference) -> Any:
    """What of a tokenizer, or processor, a program may change while a load uses it, except for its vocabulary: to be
    compared with the same of another time, in a thousandth of the time of a fingerprint."""
    backend, made = reference.backend, reference.made
    of_backend = None if backend is None else small_state(backend)
    return reference.settings(), of_backend, None if made is None else repr(made.decides())


def package_versions() -> list[Any]:
    """The versions of everything that makes ids."""
    further = tokenizers1_version()
    return [*_all_versions(version, own_code, _PACKAGES), *([further] if further else [])]


@cache
def _all_versions(version: Callable[[str], str], own_code: Callable[[], str], packages: tuple[str, ...]) -> list[Any]:
    return [own_code(), sys.version_info[:3], [f"{package} {version(package)}" for package in packages]]


@cache
def own_code() -> str:
    """Digest of this package's source: between two versions, a bug may have been fixed."""
    digest = hashlib.blake2b(__version__.encode(), digest_size=12)
    # In each load of a new process: a Path for each file would take as long again.
    folders = os.walk(Path(__file__).parents[1])
    files = [os.path.join(folder, name) for folder, _, names in folders for name in names]
    for file in sorted(name for name in files if name.endswith((".py", ".cu", ".cuh"))):
        with open(file, "rb", buffering=0) as source:
            digest.update(source.read())
    return digest.hexdigest()


def is_plain(value: Any) -> bool:
    """Whether `repr` identifies a value."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def entry_key(content: bytes, decides: bytes) -> str:
    """The name of an entry, by the digest of the prompts of its file, and what `decides_ids`."""
    return hashlib.blake2b(content + decides, digest_size=16).hexdigest()


def key_maker(reference: Reference, options: Options, clock: Clock | None) -> Callable[[bytes], str] | str:
    """How entries of a tokenizer are named, for those who write them elsewhere: a function from the digest of a file's
    prompts (`Source.content`) to the key of its entry; or why no digest can identify the ids."""
    reason = uncacheable_reason(reference, clock)
    return reason if reason else partial(entry_key, decides=decides_ids(reference, options, clock))
