"""What the integration with TRL relies on: the version and private methods."""

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from gpuload.integrations.trl import contract
from gpuload.integrations.trl.contract import COLLATORS, MODULES, PARAMETERS, contract_problem, order_problem

NAMES = {
    "trl.data_utils": ("extract_prompt", "pack_dataset", "unpair_preference_dataset"),
    "trl.trainer.utils": ("global_then_local_main_first",),
}


def modules(**changed: Any) -> dict[str, Any]:
    """Stand-ins for TRL's modules, with only what the integration uses."""

    class SFTTrainer:
        def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name): ...  # type: ignore[no-untyped-def]

    class OtherTrainer:
        def _prepare_dataset(self, dataset, processing_class, args, dataset_name): ...  # type: ignore[no-untyped-def]

    trainers = dict.fromkeys(PARAMETERS, OtherTrainer) | {"SFTTrainer": SFTTrainer} | changed
    found = {name: SimpleNamespace(**dict.fromkeys(functions)) for name, functions in NAMES.items()}
    for module, (name, fields) in COLLATORS.items():
        found[module] = SimpleNamespace(**{name: make_dataclass(name, fields)})
    return found | {"trl": SimpleNamespace(**trainers)}


def test_the_contract() -> None:
    assert set(modules()) == set(MODULES)
    assert contract_problem("1.16.0", modules()) is None
    assert contract_problem("1.16.3.dev0", modules()) is None


def test_another_version_is_noticed() -> None:
    assert contract_problem("1.17.0", modules()) == "TRL 1.17.0 is installed"
    assert contract_problem("unknown", modules()) == "TRL unknown is installed"


def test_a_change_of_a_private_name_is_noticed() -> None:
    class Changed:
        def _prepare_dataset(self, dataset, args): ...  # type: ignore[no-untyped-def]

    problem = contract_problem("1.16.0", modules(KTOTrainer=Changed))
    assert problem == "KTOTrainer._prepare_dataset has the parameters self, dataset, args"
    problem = contract_problem("1.16.0", modules(DPOTrainer=object))
    assert problem == "DPOTrainer._prepare_dataset has the parameters (none)"
    without = modules() | {"trl.data_utils": SimpleNamespace(pack_dataset=None, unpair_preference_dataset=None)}
    assert contract_problem("1.16.0", without) == "trl.data_utils has no extract_prompt"
    module = "trl.trainer.reward_trainer"
    other = modules() | {module: SimpleNamespace(DataCollatorForPreference=make_dataclass("C", ["pad_token_id", "x"]))}
    problem = f"{module}.DataCollatorForPreference has the fields pad_token_id, x"
    assert contract_problem("1.16.0", other) == problem
    problem = f"{module}.DataCollatorForPreference has the fields (none)"
    assert contract_problem("1.16.0", modules() | {module: SimpleNamespace()}) == problem


def test_the_installed_trl_is_supported() -> None:
    pytest.importorskip("trl", reason="the contract is TRL's")
    from gpuload.integrations.trl import trainers

    assert trainers.PROBLEM is None


def test_with_another_trl_its_own_method_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="the contract is TRL's")
    from gpuload.integrations.trl import trainers

    monkeypatch.setattr(trainers, "PROBLEM", "TRL 9 is installed")
    for name in PARAMETERS:
        kind = getattr(trainers, name)
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
