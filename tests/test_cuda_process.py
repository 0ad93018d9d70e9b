"""What a process shares among its loads on GPUs: the number of the GPU, and one memory pool per GPU."""

import threading
from collections.abc import Callable

import pytest
import torch

from gpuload.engines.device.cuda import Pools, number_of


@pytest.mark.parametrize(
    ("device", "rank", "count", "number"),
    [("cuda", "3", 4, 3), ("auto", "3", 4, 3), ("cuda:1", "3", 4, 1), ("cuda", "3", 1, 0), ("cuda", None, 4, 0)],
)
def test_a_rank_uses_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: str | None, count: int, number: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert number_of(device) == number


def test_the_current_gpu_of_torch_counts_more_than_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert number_of("cuda") == 2


def installer(events: list[str], limit: int) -> Callable[[], tuple[int, Callable[[], None]]]:
    def install() -> tuple[int, Callable[[], None]]:
        events.append(f"install {limit}")
        return limit, lambda: events.append(f"remove {limit}")

    return install


def test_loads_at_the_same_time_share_a_pool() -> None:
    pools, events = Pools(), list[str]()
    first_inside, second_inside, first_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with pools.use(0, installer(events, 100)) as limit:
            assert limit == 100
            first_inside.set()
            assert second_inside.wait(60)
        first_left.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_inside.wait(60)
    with pools.use(0, installer(events, 200)) as limit:
        assert limit == 100
        second_inside.set()
        assert first_left.wait(60)
        assert events == ["install 100"]  # the first load has ended, and the second one still uses the pool
    thread.join()
    assert events == ["install 100", "remove 100"]
    with pools.use(0, installer(events, 300)) as limit, pools.use(1, installer(events, 400)) as other:
        assert (limit, other) == (300, 400)
    assert events[2:] == ["install 300", "install 400", "remove 400", "remove 300"]


def test_a_pool_that_cannot_be_made_is_not_counted() -> None:
    pools, events = Pools(), list[str]()

    def fail() -> tuple[int, Callable[[], None]]:
        raise MemoryError

    with pytest.raises(MemoryError), pools.use(0, fail):
        pass
    with pools.use(0, installer(events, 100)):
        pass
    assert events == ["install 100", "remove 100"]


def test_a_pool_is_removed_after_an_error() -> None:
    pools, events = Pools(), list[str]()
    with pytest.raises(ValueError, match="in a load"), pools.use(0, installer(events, 100)):
        raise ValueError("in a load")
    assert events == ["install 100", "remove 100"]
