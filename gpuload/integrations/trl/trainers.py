"""TRL's trainers, with datasets prepared by columns and batches made from flat ids."""

import functools
import inspect
import sys
import warnings
from contextlib import suppress
from typing import Any

import trl

from gpuload.core.errors import OptionError
from gpuload.integrations.core import imported, release_of
from gpuload.integrations.known_code import change
from gpuload.integrations.trl.contract import KNOWN, NAMES, TRAINERS, contract_problem

RELEASE = release_of("trl", "TRL")


def _problems() -> dict[str, str]:
    """Trainer → why it is not replaced."""
    _, missing = imported(NAMES)
    if missing:
        return dict.fromkeys(TRAINERS, missing)
    collators = {name: getattr(sys.modules[used.module], used.collator) for name, used in TRAINERS.items()}
    found = {name: contract_problem(name, getattr(trl, name), collators[name]) for name in TRAINERS}
    return {name: problem for name, problem in found.items() if problem is not None}


PROBLEMS = _problems()
for _problem in dict.fromkeys(PROBLEMS.values()):
    _named = " and ".join(name for name, why in PROBLEMS.items() if why == _problem)
    warnings.warn(f"gpuload: {RELEASE} prepares the datasets of {_named} itself: {_problem}", stacklevel=2)
if len(PROBLEMS) < len(TRAINERS):
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from gpuload.integrations.trl import preference, sft
    from gpuload.integrations.trl.batches import as_collated, use_flat_batches
    from gpuload.integrations.trl.null_images import give_ids
    from gpuload.integrations.trl.preparation import prepare
    from gpuload.integrations.trl.served import prepare_served, served_options
    from gpuload.integrations.trl.steps import Call


def _construct(trainer: Any, name: str, stock: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    trainer.has_flat_batches = False
    with suppress(TypeError):  # which TRL raises, too
        arguments = inspect.signature(stock).bind(*given, **named).arguments
        trainer.has_flat_batches = name not in PROBLEMS and arguments.get("data_collator") is None
        kinds = getattr(arguments.get("train_dataset"), "features", None) or {}
        if "images" in kinds:
            from gpuload.integrations.trl.image_batches import check_trainer

            check_trainer(name, kinds, arguments.get("data_collator") is not None)
    stock(*given, **named)
    if name == "SFTTrainer" and _served(trainer.args, PROBLEMS.get(name)) and not hasattr(trainer, "_as_served"):
        raise OptionError("dataset_kwargs: turns='served' is for texts, and TRL's collator prepares data with images")
    if getattr(trainer, "_is_vision_dataset", False):  # whose lengths are removed before they are looked for
        trainer._set_signature_columns_if_needed()
        trainer._signature_columns = [*trainer._signature_columns, trainer.args.length_column_name]
    if trainer.has_flat_batches:
        if type(trainer.data_collator) is DataCollatorForVisionLanguageModeling:
            method = trl.SFTTrainer._prepare_dataset
            if not give_ids(trainer, method, change(RELEASE, KNOWN, method)):
                return
        use_flat_batches(trainer)


def _served(args: Any, problem: str | None) -> dict[str, Any]:
    """The options of `dataset_kwargs` for rows as served, which TRL does not know. An `OptionError` if one is wrong, or
    the installed TRL has to prepare its datasets itself."""
    if problem is None:
        return served_options(args)
    if "turns" in (getattr(args, "dataset_kwargs", None) or {}):
        raise OptionError(f"dataset_kwargs: turns is not possible: {RELEASE} prepares datasets itself: {problem}")
    return {}


def _prepare(trainer: Any, name: str, stock: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    arguments = inspect.signature(stock).bind(*given, **named).arguments
    served = _served(arguments.get("args"), PROBLEMS.get(name)) if name == "SFTTrainer" else {}
    if name in PROBLEMS:
        return stock(*given, **named)
    steps = {"SFT": sft.SFT, "DPO": preference.DPO, "Reward": preference.RM, "KTO": preference.KTO}
    call = Call(trainer, stock, arguments, change(RELEASE, KNOWN, stock))
    if served:
        trainer._as_served = True
        return as_collated(trainer, prepare_served(call, steps["SFT"], served))
    # Also datasets that `evaluate` gets.
    return as_collated(trainer, prepare(call, steps[name.removesuffix("Trainer")]))


def _precompute(trainer: Any, stock: Any, dataset: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A dataset with the reference model's log probabilities, by TRL's method, which makes batches of the dataset."""
    if not trainer.has_flat_batches:
        return stock(dataset, *given, **named)
    use_flat_batches(trainer)
    return as_collated(trainer, stock(as_collated(trainer, dataset), *given, **named))


class SFTTrainer(trl.SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`. Conversations, prompts with completions and texts are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, "SFTTrainer", super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "SFTTrainer", super()._prepare_dataset, given, named)


class DPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer`. Pairs are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, "DPOTrainer", super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "DPOTrainer", super()._prepare_dataset, given, named)

    def _precompute_ref_logps(self, dataset: Any, *given: Any, **named: Any) -> Any:
        return _precompute(self, super()._precompute_ref_logps, dataset, given, named)


class RewardTrainer(trl.RewardTrainer):  # type: ignore[misc]
    """TRL's `RewardTrainer`. Pairs are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, "RewardTrainer", super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "RewardTrainer", super()._prepare_dataset, given, named)


class KTOTrainer(trl.KTOTrainer):  # type: ignore[misc]
    """TRL's `KTOTrainer`. Answers with labels, or pairs, are tokenized by columns."""

    def __init__(self, *given: Any, **named: Any) -> None:
        _construct(self, "KTOTrainer", super().__init__, given, named)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        return _prepare(self, "KTOTrainer", super()._prepare_dataset, given, named)

    def _precompute_ref_logps(self, dataset: Any, *given: Any, **named: Any) -> Any:
        return _precompute(self, super()._precompute_ref_logps, dataset, given, named)


for _kind in (SFTTrainer, DPOTrainer, RewardTrainer, KTOTrainer):  # `help` and editors show TRL's arguments
    functools.update_wrapper(vars(_kind)["__init__"], _kind.__mro__[1].__init__)
