"""Tokenizers that an earlier load has opened: what a load needs to know of them if nothing is to be tokenized.

Importing transformers and opening a tokenizer takes seconds. If all ids of a load are cached, neither is needed: what
decides the ids, the padding token and the template are remembered for the files of a tokenizer that is given by its
path. The files are the same if their names, inodes, sizes and times are, as in `known_files.py`.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from gpuload.cache.directory import digests_directory
from gpuload.cache.key import is_plain, package_versions, uncacheable_reason
from gpuload.cache.known_files import SETTLED, read_facts, write_facts
from gpuload.core.errors import TokenizerError
from gpuload.core.options import Options
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import TemplateCall
from gpuload.reference.volatile import Clock, contains_randomness, tells_time


class KnownReference(Reference):
    """A `Reference` that opens the tokenizer when something is asked that is not remembered.

    The constructor of `Reference` would open it. What that sets is remembered, or taken from an opened one when it is
    first asked for. `known_kind` mixes this class into other kinds of references; `own` is what their constructors keep
    of their own arguments.
    """

    by_name = True

    def __init__(self, **own: Any):
        vars(self).update(own)

    def know(self, facts: Mapping[str, Any], open_tokenizer: Callable[[], Reference]) -> Self:
        """The same, with what is remembered."""
        self._facts, self.name, self.uses_template = facts, facts["name"], facts["uses_template"]
        self._open = open_tokenizer
        return self

    @cached_property
    def _opened(self) -> Reference:
        return self._open()

    @cached_property
    def tokenizer(self) -> Any:
        return self._opened.tokenizer

    @cached_property
    def calling(self) -> Any:
        return self._opened.calling

    @cached_property  # which mypy takes for read-only
    def call(self) -> TemplateCall:  # type: ignore[override]
        return self._opened.call

    @cached_property
    def template_text(self) -> str:
        return str(self._facts["template_text"])

    @property
    def pad_token_id(self) -> int:
        return int(self._facts["pad_token_id"])

    @property
    def sanitizes(self) -> bool:
        return bool(self._facts["sanitizes"])

    def fingerprint(self) -> str:
        return str(self._facts["fingerprint"])

    def fingerprint_later(self) -> Callable[[], str]:
        return partial(str, self._facts["fingerprint"])

    def clock_stopped(self) -> AbstractContextManager[Clock | None]:
        return nullcontext()  # the template does not tell the time


def known_kind(kind: type[Reference]) -> type[KnownReference]:
    """`KnownReference` for a kind of references."""
    return KnownReference if kind is Reference else type(f"Known{kind.__name__}", (KnownReference, kind), {})


def open_known(tokenizer: Any, options: Options, kind: type[Reference] = Reference, **own: Any) -> Reference:
    """The tokenizer of a load, as a kind of reference; one that is remembered is opened when it is needed. `own` is
    what this kind takes in addition, and keeps under the same names."""
    known = known_kind(kind)(**own)
    path = _facts_path(tokenizer, options, kind, known.variant)
    facts = read_facts(path) if path is not None else None
    if path is None or facts is None:
        return kind(tokenizer, **own, **options.of_tokenizer())
    # The process may be in another directory when the tokenizer is opened, and its files may be others.
    again = partial(kind, str(_absolute(tokenizer)), **own, **options.of_tokenizer())
    return known.know(facts, partial(_the_same, again, facts["fingerprint"]))


def _the_same(open_tokenizer: Callable[[], Reference], fingerprint: str) -> Reference:
    """The opened tokenizer.

    Raises:
        TokenizerError: it is not the one with this fingerprint.
    """
    opened = open_tokenizer()
    if opened.fingerprint() != fingerprint:
        raise TokenizerError(f"{opened.name}: the tokenizer was changed since the load: load again")
    return opened


def _absolute(tokenizer: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(os.fspath(tokenizer))).absolute()


def remember(tokenizer: Any, options: Options, reference: Reference) -> None:
    """Remembers a tokenizer for the next load, after it was used."""
    if isinstance(reference, KnownReference) or uncacheable_reason(reference, None) is not None:
        return
    template = reference.template_text
    path = _facts_path(tokenizer, options, type(reference), reference.variant)
    if path is None or contains_randomness(template) or tells_time(template):
        return
    names = ("name", "uses_template", "template_text", "pad_token_id", "sanitizes")
    facts = {name: getattr(reference, name) for name in names} | {"fingerprint": reference.fingerprint()}
    with suppress(OSError, TypeError):
        write_facts(path, facts)


def _facts_path(tokenizer: Any, options: Options, kind: type[Reference], variant: str) -> Path | None:
    """Where the facts of a tokenizer are; None if it is not one whose files decide everything."""
    if not isinstance(tokenizer, str | os.PathLike) or options.trust_remote_code or not options.token_cache:
        return None
    given = _absolute(tokenizer)
    if not os.path.exists(given) or not is_plain(dict(options.apply_chat_template_kwargs)):
        return None
    states = _states(given if given.is_dir() else given.parent)
    if not states or max(changed for state in states for changed in state[-2:]) / 1e9 + SETTLED > time.time():
        return None
    template = options.chat_template if options.chat_template is None else str(options.chat_template)
    as_what = [kind.__qualname__, variant, template, dict(options.apply_chat_template_kwargs), options.pad_token_id]
    given_as = [str(given), states, *as_what]
    digest = hashlib.blake2b(repr([given_as, package_versions()]).encode(errors="backslashreplace"), digest_size=16)
    return digests_directory(options.cache_dir) / f"{digest.hexdigest()}.tokenizer.json"


def _states(directory: Path) -> list[list[Any]] | None:
    """What each file in a directory is recognized by, the last two of it the times of its last changes, in ns; None if
    that is not known of all of them."""
    try:
        inside = sorted(directory.rglob("*"))
        if any(path.is_dir() and path.is_symlink() for path in inside):  # of templates; their files are not looked at
            return None
        found = [(str(file), file.stat()) for file in inside if file.is_file()]
    except OSError:  # closed to this user, or removed: who opens the tokenizer says so
        return None
    return [[name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns] for name, at in found]
