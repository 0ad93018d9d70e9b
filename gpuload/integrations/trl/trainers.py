"""TRL's trainers, with datasets prepared by columns and batches made from flat ids."""

import functools
import inspect
import sys
import warnings
from contextlib import suppress
from typing import Any, TypeVar

import trl

from gpuload.core.errors import OptionError
from gpuload.integrations.core import imported, release_of
from gpuload.integrations.known_code import change
from gpuload.integrations.trl.contract import KNOWN, NAMES, TRAINERS, contract_problem

RELEASE = release_of("trl", "TRL")

_Kind = TypeVar("_Kind", bound=type)


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


def _served(args: Any, problem: str | None) -> dict[str, Any]:
    """The options of `dataset_kwargs` for rows as served, which TRL does not know. An `OptionError` if one is wrong, or
    the installed TRL has to prepare its datasets itself."""
    if problem is None:
        return served_options(args)
    if "turns" in (getattr(args, "dataset_kwargs", None) or {}):
        raise OptionError(f"dataset_kwargs: turns is not possible: {RELEASE} prepares datasets itself: {problem}")
    return {}


class _ByColumns:
    """What the trainers here do in the place of TRL's, the class after it."""

    replaced: str  # the name of TRL's trainer

    def __init__(self, *given: Any, **named: Any) -> None:
        trainer: Any = self
        stock, name = super().__init__, self.replaced
        self.has_flat_batches = False
        with suppress(TypeError):  # which TRL raises, too
            arguments = inspect.signature(stock).bind(*given, **named).arguments
            self.has_flat_batches = name not in PROBLEMS and arguments.get("data_collator") is None
            kinds = getattr(arguments.get("train_dataset"), "features", None) or {}
            if "images" in kinds:
                from gpuload.integrations.trl.image_batches import check_trainer

                check_trainer(name, kinds, arguments.get("data_collator") is not None)
        stock(*given, **named)
        if name == "SFTTrainer" and _served(trainer.args, PROBLEMS.get(name)) and not hasattr(self, "_as_served"):
            raise OptionError(
                "dataset_kwargs: turns='served' is for texts, and TRL's collator prepares data with images"
            )
        if getattr(self, "_is_vision_dataset", False):  # whose lengths are removed before they are looked for
            trainer._set_signature_columns_if_needed()
            trainer._signature_columns = [*trainer._signature_columns, trainer.args.length_column_name]
        if self.has_flat_batches:
            if type(trainer.data_collator) is DataCollatorForVisionLanguageModeling:
                method = trl.SFTTrainer._prepare_dataset
                if not give_ids(self, method, change(RELEASE, KNOWN, method)):
                    return
            use_flat_batches(self)

    def _prepare_dataset(self, *given: Any, **named: Any) -> Any:
        stock, name = super()._prepare_dataset, self.replaced  # type: ignore[misc]
        arguments = inspect.signature(stock).bind(*given, **named).arguments
        served = _served(arguments.get("args"), PROBLEMS.get(name)) if name == "SFTTrainer" else {}
        if name in PROBLEMS:
            return stock(*given, **named)
        call = Call(self, stock, arguments, change(RELEASE, KNOWN, stock))
        if served:
            self._as_served = True
            return as_collated(self, prepare_served(call, sft.SFT, served))
        steps = {"SFT": sft.SFT, "DPO": preference.DPO, "Reward": preference.RM, "KTO": preference.KTO}
        # Also datasets that `evaluate` gets.
        return as_collated(self, prepare(call, steps[name.removesuffix("Trainer")]))

    def _precompute_ref_logps(self, dataset: Any, *given: Any, **named: Any) -> Any:
        """A dataset with the reference model's log probabilities, by TRL's method, which makes batches of it."""
        stock = super()._precompute_ref_logps  # type: ignore[misc]
        if not self.has_flat_batches:
            return stock(dataset, *given, **named)
        use_flat_batches(self)
        return as_collated(self, stock(as_collated(self, dataset), *given, **named))


def _in_its_place(kind: _Kind) -> _Kind:
    """The class, which has the name of TRL's trainer, with TRL's arguments, which `help` and editors show."""
    made: Any = kind

    @functools.wraps(made.__mro__[2].__init__)
    def construct(self: Any, *given: Any, **named: Any) -> None:
        super(made, self).__init__(*given, **named)

    made.replaced, made.__init__ = made.__name__, construct
    return kind


@_in_its_place
class SFTTrainer(_ByColumns, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`. Conversations, prompts with completions and texts are tokenized by columns."""


@_in_its_place
class DPOTrainer(_ByColumns, trl.DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer`. Pairs are tokenized by columns."""


@_in_its_place
class RewardTrainer(_ByColumns, trl.RewardTrainer):  # type: ignore[misc]
    """TRL's `RewardTrainer`. Pairs are tokenized by columns."""


@_in_its_place
class KTOTrainer(_ByColumns, trl.KTOTrainer):  # type: ignore[misc]
    """TRL's `KTOTrainer`. Answers with labels, or pairs, are tokenized by columns."""
