"""The exceptions of gpuload, by what the user can do about them.

Every message says what is wrong, where (file, row, key) and what to do.
"""


class GpuloadError(Exception):
    """Base class of all exceptions that gpuload raises on purpose."""


class OptionError(GpuloadError, ValueError):
    """An unknown option, or an invalid value."""


class SourceError(GpuloadError, OSError):
    """A file that cannot be found, downloaded or read."""


class DataError(GpuloadError, ValueError):
    """A file that was read but does not hold what it should."""


class TokenizerError(GpuloadError, ValueError):
    """A tokenizer that cannot be loaded, or has no chat template or padding token."""


class PromptTooLongError(GpuloadError, ValueError):
    """A row longer than `max_prompt_length` was requested with `truncation="error"`."""


class MismatchError(GpuloadError, RuntimeError):
    """The fast path returned other tokens than the tokenizer, with `strict=True`."""


class DeviceError(GpuloadError, RuntimeError):
    """The requested device is not available, does not work, or has too little memory."""


class ResumeError(GpuloadError, ValueError):
    """A loader state for other data, another tokenizer or other settings."""
