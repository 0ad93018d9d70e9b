"""The exceptions of gpuload, one class for each kind of remedy.

Every message says what is wrong, where (file, row, key) and what to do.
"""

from typing import Any


class GpuloadError(Exception):
    """Base class of all exceptions that gpuload raises.

    Each subclass also derives from the built-in exception of the same meaning, so `except ValueError` works too.

    Examples:
        >>> import gpuload
        >>> try:
        ...     gpuload.load("train.parquet", "tokenizer", max_promt_length=512)
        ... except gpuload.GpuloadError as error:
        ...     print(f"{type(error).__name__}: {error}")
        OptionError: unknown option max_promt_length: did you mean max_prompt_length?
    """


class OptionError(GpuloadError, ValueError):
    """An unknown option, or an invalid value of one."""


class SourceError(GpuloadError, OSError):
    """A file that cannot be found, downloaded or read."""


class DataError(GpuloadError, ValueError):
    """A file that was read, but has no usable prompts."""


class NoRowsError(DataError):
    """All rows were dropped.

    Attributes:
        report: of the load, which says why; None where no load was begun.
    """

    def __init__(self, message: str, report: Any = None):
        super().__init__(message)
        self.report = report


class TokenizerError(GpuloadError, ValueError):
    """A tokenizer that cannot be loaded, or that lacks a chat template or a padding token."""


class PromptTooLongError(GpuloadError, ValueError):
    """A row is longer than `max_prompt_length`, and `truncation="error"`."""


class MismatchError(GpuloadError, RuntimeError):
    """The fast path produced other tokens than the reference, and `strict=True`."""


class DeviceError(GpuloadError, RuntimeError):
    """The requested device is not available, does not work, or has run out of memory."""


class ContextLostError(DeviceError):
    """The GPU failed in a way after which nothing in the process can use it: the process must be started again."""


class HostMemoryError(GpuloadError, MemoryError):
    """The host has too little memory for a load."""


class ResumeError(GpuloadError, ValueError):
    """A loader state was saved with other data, another tokenizer or other settings."""


class ExportError(GpuloadError, OSError):
    """A directory for prepared data that cannot be written."""


class StoreError(GpuloadError, OSError):
    """A store on disk, or one shared by several machines, that cannot be written or read."""


MORE_MEMORY = "free memory, or load fewer rows at a time"
