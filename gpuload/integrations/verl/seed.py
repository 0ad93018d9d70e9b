"""SeedRLHFDataset: the rows of verl 0.1 to 0.6, which carried tensors, from `gpuload.load`.

Those versions render, tokenize and pad a prompt at each access. Here a row is a slice of the store of ids, and a batch
one gather. For verl 0.4 to 0.6:

    data.custom_cls.path=/path/to/file.py data.custom_cls.name=SeedRLHFDataset   # a file that imports this class

and for verl 0.1 to 0.3 in place of its import: `from gpuload.integrations.verl import SeedRLHFDataset as RLHFDataset`.
verl itself is not needed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpuload.dataset import PromptDataset, Row
from gpuload.errors import OptionError, ResumeError
from gpuload.fingerprint import difference
from gpuload.integrations.verl.settings import Settings
from gpuload.load import load
from gpuload.options import Options, plain

_OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))


class SeedRLHFDataset(torch.utils.data.Dataset[Row]):
    """Prompts as tensors; a row has the keys of a `gpuload.PromptDataset`.

    With a `config`, as verl passes it since 0.4, rows also have `tools_kwargs` and `interaction_kwargs`, and
    `extra_info` is {} where a row has none.

    >>> SeedRLHFDataset(parquet_files=files, tokenizer=tokenizer, prompt_key="prompt", max_prompt_length=512)  # 0.1-0.3
    >>> SeedRLHFDataset(data_files=files, tokenizer=tokenizer, config=config.data, processor=None)             # 0.4-0.6

    Args:
        data_files, parquet_files: the files; one of the two.
        tokenizer: as for `gpuload.load`.
        config: verl's `data:` section, whose keys are options of `gpuload.load` where they have such a name; those of
            `Settings.options` stand under `gpuload`.
        processor: None; prompts with images are not for this class.
        max_samples: as the option, for verl 0.6.1.
        **options: options of `gpuload.load`, instead of a `config`.

    Attributes:
        prompts: the `PromptDataset`.
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
            raise OptionError("SeedRLHFDataset serves prompts of text: with a processor, use verl's own class")
        if config is not None and not isinstance(config, Mapping):
            raise OptionError(f"config={config!r:.60}: expected verl's data section; give options by name")
        self._files = plain(files)
        self._tokenizer = tokenizer
        self._extras = config is not None
        self._options = _of_config(config or {}) | options | ({} if max_samples == -1 else {"max_samples": max_samples})
        self._fingerprint: Mapping[str, Any] | None = None
        self._prompts: PromptDataset | None = None
        self.resume_dataset_state()

    @property
    def prompts(self) -> PromptDataset:
        if self._prompts is None:
            self.resume_dataset_state()
        assert self._prompts is not None
        return self._prompts

    def resume_dataset_state(self) -> None:
        """Loads the prompts, again after a checkpoint; verl 0.2 calls this.

        Raises:
            ResumeError: they are other prompts than at the time of the checkpoint, or others' tokens.
        """
        self._prompts = load(self._files, self._tokenizer, **self._options)
        changed = difference(self._fingerprint, self._prompts.fingerprint) if self._fingerprint else None
        if changed:
            raise ResumeError(f"the checkpoint is of other data: {changed}")
        self._fingerprint = self._prompts.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # verl 0.2 writes its data loader, and the data set with it, into each checkpoint: without the data.
        return self.__dict__ | {"_prompts": None}

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, row: int) -> Row:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Several rows at the cost of one gather; see `PromptDataset.__getitems__`."""
        taken = self.prompts.__getitems__(rows)
        if self._extras:
            for row in taken:
                extra = row["extra_info"] = row.get("extra_info") or {}
                row["tools_kwargs"] = extra.get("tools_kwargs", {})
                row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        return taken


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options in verl's `data:` section: those with a known name, and those under `gpuload`."""
    return {key: config[key] for key in config if key in _OPTIONS} | Settings.parse(config).options()
