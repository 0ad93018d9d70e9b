"""What can go wrong, by whose hands it can be mended.

Every message says what was wrong, where (file, row, key) and what to do.
"""


class GpuloadError(Exception):
    """Any error that gpuload raises on purpose."""


class OptionError(GpuloadError, ValueError):
    """An option that does not exist or a value that makes no sense."""


class SourceError(GpuloadError, OSError):
    """A file that cannot be found, fetched or read."""


class DataError(GpuloadError, ValueError):
    """A file that was read and does not hold what it should."""


class TokenizerError(GpuloadError, ValueError):
    """A tokenizer that cannot serve: not found, without a chat template, without a padding token."""


class PromptTooLongError(GpuloadError, ValueError):
    """A row longer than `max_prompt_length` was asked for while `truncation="error"`."""


class MismatchError(GpuloadError, RuntimeError):
    """The fast path and the reference gave different tokens, and `strict=True`."""


class DeviceError(GpuloadError, RuntimeError):
    """A device was asked for that is not there or does not work."""


class ResumeError(GpuloadError, ValueError):
    """A loader state that belongs to other data, another tokenizer or other settings."""
