"""A plugin for pytest (`-p on_torchvision`): processors have the image processors that need torchvision, which has to
be importable (`make images-test`)."""

import importlib

import pytest

import bench.cuda_torchvision  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    importlib.import_module("torchvision")
