"""Which core a worker's communication threads run on."""

from __future__ import annotations

import os
import threading

import pytest

from kvstore_hvd.affinity import chosen_core, threads_on
from kvstore_hvd.errors import ConfigError


def test_each_worker_of_the_host_has_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [chosen_core((5, 0, 7), rank, 3) for rank in range(3)] == [5, 0, 7]
    assert chosen_core((5, 0, 7), 1, 2) == 0
    assert chosen_core((), 1, 2) is None


@pytest.mark.parametrize("cores", [(0,), (0, 8)])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_raises_on_every_worker(
    monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], rank: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with pytest.raises(ConfigError, match=r"for 2 workers on this host, which has the cores 0 to 7\."):
        chosen_core(cores, rank, 2)


def test_threads_started_inside_run_there_and_the_caller_where_it_did() -> None:
    before = os.sched_getaffinity(0)
    core, seen = max(before), []
    with threads_on(core):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before
    with threads_on(None):
        assert os.sched_getaffinity(0) == before


def test_a_core_that_may_not_be_used() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="core 100000 cannot be used"), threads_on(100_000):
        pass
    assert os.sched_getaffinity(0) == before
