"""URLs and errors of file systems, without what may be secret; the error for a file that has changed."""

import hashlib
import re
from urllib.parse import urlsplit

from gpuload.core.errors import SourceError

_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def is_url(name: str) -> bool:
    """Whether a name of files is a URL, and not a path."""
    return "://" in name or name.startswith("hdfs:")


def without_secrets(text: str) -> str:
    """A text in which the URLs have no user, password, query or fragment.

    A digest takes the place of the query, so that two URLs that differ only in their queries remain different.
    """
    return _URL.sub(lambda url: _without_secrets(url[0]), text)


def _without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # not a URL after all
        return url.partition("?")[0].partition("#")[0]
    secret = parts.query + parts.fragment
    digest = f"?redacted-{hashlib.sha256(secret.encode(errors='replace')).hexdigest()[:8]}" if secret else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{digest}"


def changed(name: str) -> SourceError:
    """The error for a file that did not stay the same."""
    return SourceError(f"{name}: the file was changed while it was loaded: load it again when it is complete")


def reason_of(error: BaseException) -> str:
    """Why a file system failed, without what may be secret."""
    if not isinstance(error, FileNotFoundError):
        return f"{type(error).__name__}: {without_secrets(str(error))}"
    # fsspec reports every failure of a web server as a missing file; the cause says what it was.
    cause = error.__cause__
    web = type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError)
    if web and getattr(cause, "status", None) != 404:
        return f"{type(cause).__name__}: {without_secrets(str(cause))}"
    return "no such file"
