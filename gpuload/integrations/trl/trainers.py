"""TRL's trainers, with datasets prepared by columns. Only `_prepare_dataset` is overridden."""

import importlib
import inspect
import warnings
from typing import Any

import trl

from gpuload.integrations.trl.contract import MODULES, SUPPORTED, contract_problem

PROBLEM = contract_problem(trl.__version__, {name: importlib.import_module(name) for name in MODULES})
if PROBLEM:
    warnings.warn(
        f"gpuload.integrations.trl supports TRL {SUPPORTED}, but {PROBLEM}: TRL prepares the datasets itself",
        stacklevel=2,
    )


def _prepare(trainer: Any, steps: str, stock: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if PROBLEM:
        return stock(*given, **named)
    from gpuload.integrations.trl import preference, sft
    from gpuload.integrations.trl.preparation import Call, prepare

    chosen = sft.SFT if steps == "SFT" else getattr(preference, steps)
    return prepare(Call(trainer, stock, inspect.signature(stock).bind(*given, **named).arguments), chosen)


class SFTTrainer(trl.SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`. Conversations, prompts with completions and texts are tokenized by columns."""

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "SFT", super()._prepare_dataset, given, named)


class DPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer`. Pairs are tokenized by columns."""

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "DPO", super()._prepare_dataset, given, named)


class RewardTrainer(trl.RewardTrainer):  # type: ignore[misc]
    """TRL's `RewardTrainer`. Pairs are tokenized by columns."""

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "RM", super()._prepare_dataset, given, named)


class KTOTrainer(trl.KTOTrainer):  # type: ignore[misc]
    """TRL's `KTOTrainer`. Answers with labels, or pairs, are tokenized by columns."""

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "KTO", super()._prepare_dataset, given, named)
