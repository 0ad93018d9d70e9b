"""TRL's trainers, with datasets prepared by columns and batches made from flat ids."""

import functools
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
else:
    from gpuload.integrations.trl import preference, sft
    from gpuload.integrations.trl.batches import use_flat_batches
    from gpuload.integrations.trl.preparation import Call, prepare


def _construct(trainer: Any, stock: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    stock(*given, **named)
    if not PROBLEM and inspect.signature(stock).bind(*given, **named).arguments.get("data_collator") is None:
        use_flat_batches(trainer)


def _prepare(trainer: Any, steps: str, stock: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if PROBLEM:
        return stock(*given, **named)
    chosen = sft.SFT if steps == "SFT" else getattr(preference, steps)
    return prepare(Call(trainer, stock, inspect.signature(stock).bind(*given, **named).arguments), chosen)


class SFTTrainer(trl.SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`. Conversations, prompts with completions and texts are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "SFT", super()._prepare_dataset, given, named)


class DPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer`. Pairs are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "DPO", super()._prepare_dataset, given, named)


class RewardTrainer(trl.RewardTrainer):  # type: ignore[misc]
    """TRL's `RewardTrainer`. Pairs are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "RM", super()._prepare_dataset, given, named)


class KTOTrainer(trl.KTOTrainer):  # type: ignore[misc]
    """TRL's `KTOTrainer`. Answers with labels, or pairs, are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "KTO", super()._prepare_dataset, given, named)


for _kind in (SFTTrainer, DPOTrainer, RewardTrainer, KTOTrainer):  # `help` and editors show TRL's arguments
    functools.update_wrapper(vars(_kind)["__init__"], _kind.__mro__[1].__init__)
