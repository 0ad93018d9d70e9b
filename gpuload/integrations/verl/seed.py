"""SeedRLHFDataset: the dataset of verl 0.1 to 0.6, whose rows carry tensors, based on `gpuload.load`.

Those versions render, tokenize and pad a prompt at each access. This class tokenizes once, during the load.

For verl 0.4 to 0.6:

    data.custom_cls.path=/path/to/file.py data.custom_cls.name=SeedRLHFDataset   # a file that imports this class

For verl 0.1 to 0.3, replace the import of verl's class with `from gpuload.integrations.verl import SeedRLHFDataset as
RLHFDataset`. The class does not import verl.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpuload.core.errors import OptionError, ResumeError
from gpuload.core.options import Options, plain
from gpuload.dataset.fingerprint import difference
from gpuload.dataset.rows import Row
from gpuload.integrations.verl.settings import Settings
from gpuload.kinds.load import load
from gpuload.kinds.prompts import PromptDataset

_OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(Options))


class SeedRLHFDataset(torch.utils.data.Dataset[Row]):
    """Prompts as tensors. A row has the keys of a `gpuload.PromptDataset`.

    With a `config`, as verl passes it since 0.4, rows also have `tools_kwargs` and `interaction_kwargs`, and
    `extra_info` is {} instead of null.

        SeedRLHFDataset(parquet_files=files, tokenizer=tokenizer, max_prompt_length=512)                # verl 0.1-0.3
        SeedRLHFDataset(data_files=files, tokenizer=tokenizer, config=config.data, processor=None)      # verl 0.4-0.6

    Args:
        data_files: the files, as verl 0.4 and later name the argument.
        tokenizer: as in `gpuload.load`.
        config: verl's `data:` section. Keys that are options of `gpuload.load` are used, others are ignored; `Settings`
            are read from the key `gpuload`.
        processor: must be None: prompts with images are not supported.
        max_samples: the option of that name, as verl 0.6.1 passes it.
        parquet_files: the files, as verl 0.1 to 0.3 name the argument.
        **options: options of `gpuload.load`, if there is no `config`.

    Attributes:
        prompts: the `PromptDataset`.

    Raises:
        OptionError: the arguments are not as described here.
        GpuloadError: as `gpuload.load`.
    """

    def __init__(
        self,
        data_files: Any = None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        *,
        parquet_files: Any = None,
        **options: Any,
    ):
        files = data_files if parquet_files is None else parquet_files
        if files is None or (data_files is not None and parquet_files is not None):
            raise OptionError("pass the files as data_files (verl 0.4 and later) or as parquet_files (earlier)")
        if processor is not None:
            raise OptionError("SeedRLHFDataset supports text prompts only: with a processor, use verl's own class")
        if config is not None and not isinstance(config, Mapping):
            raise OptionError(f"config={config!r:.60}: expected verl's data section; pass options by name")
        self._files = plain(files)
        self._tokenizer = tokenizer
        self._has_config = config is not None
        self._options = _load_options(config or {}) | options
        if max_samples != -1:
            self._options["max_samples"] = max_samples
        self._fingerprint: Mapping[str, Any] | None = None
        self._prompts: PromptDataset | None = None
        self.resume_dataset_state()

    @property
    def prompts(self) -> PromptDataset:
        """The loaded prompts. Loaded again on first access after unpickling."""
        if self._prompts is None:
            self.resume_dataset_state()
        assert self._prompts is not None
        return self._prompts

    def resume_dataset_state(self) -> None:
        """Load the prompts; again when resuming from a checkpoint, where verl 0.2 calls this method.

        Raises:
            ResumeError: the prompts or their tokens differ from those of the checkpoint.
        """
        self._prompts = load(self._files, self._tokenizer, **self._options)
        differs = difference(self._fingerprint, self._prompts.fingerprint) if self._fingerprint else None
        if differs:
            raise ResumeError(f"the checkpoint was made with different data: {differs}")
        self._fingerprint = self._prompts.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # verl 0.2 pickles its data loader, and with it the dataset, into each checkpoint: leave out the data.
        return self.__dict__ | {"_prompts": None}

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, row: Any) -> Any:
        found = self.prompts[row]
        return self._finished(found) if isinstance(found, list) else self._finished([found])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Return several rows with one gather; see `PromptDataset.__getitems__`."""
        return self._finished(self.prompts.__getitems__(rows))

    def _finished(self, batch: list[Row]) -> list[Row]:
        if self._has_config:
            for row in batch:
                extra = row["extra_info"] = row.get("extra_info") or {}
                row["tools_kwargs"] = extra.get("tools_kwargs", {})
                row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        return batch


def _load_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `gpuload.load` in verl's `data:` section: keys with the name of an option, and those of `gpuload`."""
    return {key: config[key] for key in config if key in _OPTION_NAMES} | Settings.parse(config).options()
