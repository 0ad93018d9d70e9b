"""What the integration with TRL relies on: private methods, and their code."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Any

import pytest

from gpuload.integrations.known_code import change
from gpuload.integrations.trl import contract
from gpuload.integrations.trl.contract import TRAINERS, contract_problem, order_problem


class SFTTrainer:
    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name): ...  # type: ignore[no-untyped-def]


class OtherTrainer:
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name): ...  # type: ignore[no-untyped-def]


def collator(name: str) -> Any:
    return make_dataclass(TRAINERS[name].collator, TRAINERS[name].fields)


def test_the_contract() -> None:
    for name in TRAINERS:
        kind = SFTTrainer if name == "SFTTrainer" else OtherTrainer
        assert contract_problem(name, kind, collator(name)) is None


def test_other_parameters_are_noticed() -> None:
    class Changed:
        def _prepare_dataset(self, dataset, args): ...  # type: ignore[no-untyped-def]

    problem = contract_problem("KTOTrainer", Changed, collator("KTOTrainer"))
    assert problem == "KTOTrainer._prepare_dataset has the parameters self, dataset, args"
    problem = contract_problem("DPOTrainer", object, collator("DPOTrainer"))
    assert problem == "DPOTrainer._prepare_dataset has the parameters (none)"
    problem = contract_problem("RewardTrainer", OtherTrainer, make_dataclass("C", ["pad_token_id", "x"]))
    assert problem == "trl.trainer.reward_trainer.DataCollatorForPreference has the fields pad_token_id, x"


@pytest.fixture
def reloaded() -> Iterator[Any]:
    """Imports the trainers again, with the warnings of the import."""
    pytest.importorskip("trl", reason="the contract is TRL's")
    name = "gpuload.integrations.trl.trainers"
    before = importlib.import_module(name)

    def again() -> tuple[Any, list[str]]:
        del sys.modules[name]
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            made = importlib.import_module(name)
        return made, [str(each.message) for each in given if str(each.message).startswith("gpuload")]

    yield again
    sys.modules[name] = before


def test_the_installed_trl_is_known(reloaded: Any) -> None:
    import trl

    trainers, said = reloaded()
    assert (trainers.PROBLEMS, said) == ({}, [])
    methods = [getattr(trl, name)._prepare_dataset for name in TRAINERS]
    modules = [(importlib.import_module(used.module), used.collator) for used in TRAINERS.values()]
    collators = [getattr(module, name).torch_call for module, name in modules]
    assert change("TRL", contract.KNOWN, *methods, *collators) is None


def test_only_the_trainer_with_other_parameters_is_not_replaced(reloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    monkeypatch.setattr(trl.KTOTrainer, "_prepare_dataset", lambda self, rows, more: (rows, more))
    trainers, said = reloaded()
    assert list(trainers.PROBLEMS) == ["KTOTrainer"]
    why = "KTOTrainer._prepare_dataset has the parameters self, rows, more"
    assert said == [f"gpuload: {trainers.RELEASE} prepares the datasets of KTOTrainer itself: {why}"]
    kind = trainers.KTOTrainer
    assert kind.__new__(kind)._prepare_dataset("rows", more=1) == ("rows", 1)


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("trl.data_utils", "pack_dataset", "trl.data_utils has no pack_dataset"),
        ("trl.trainer.utils", None, "trl.trainer.utils cannot be imported"),
        (
            "trl.trainer.dpo_trainer",
            "DataCollatorForPreference",
            "trl.trainer.dpo_trainer has no DataCollatorForPreference",
        ),
    ],
)
def test_a_name_or_a_module_that_has_moved(
    reloaded: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str | None, why: str
) -> None:
    import trl

    assert trl.SFTTrainer
    if name is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(importlib.import_module(module), name)
    trainers, said = reloaded()
    assert set(trainers.PROBLEMS) == set(TRAINERS)
    (line,) = said
    names = "SFTTrainer and DPOTrainer and RewardTrainer and KTOTrainer"
    assert line.startswith(f"gpuload: {trainers.RELEASE} prepares the datasets of {names} itself: {why}")
    for each in TRAINERS:
        kind = getattr(trainers, each)
        monkeypatch.setattr(kind.__mro__[1], "_prepare_dataset", lambda self, *given, **named: (given, named))
        assert kind.__new__(kind)._prepare_dataset("rows", new=1) == (("rows",), {"new": 1})


def test_another_order_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    assert order_problem(datasets.Dataset) is None
    monkeypatch.setattr(contract, "row_numbers", lambda dataset, rows: rows)
    assert order_problem(datasets.Dataset) == "datasets has another way to select rows"
    monkeypatch.setattr(contract, "row_numbers", lambda dataset, rows: dataset._order)
    problem = "datasets has another way to select rows (AttributeError: 'Dataset' object has no attribute '_order')"
    assert order_problem(datasets.Dataset) == problem
