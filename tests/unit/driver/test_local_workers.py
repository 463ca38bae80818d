"""How much a worker may say to its daemon."""

from __future__ import annotations

from kvstore_hvd.driver.local_workers import LocalWorker


def test_what_a_worker_says_is_counted_by_the_second() -> None:
    worker = LocalWorker(0)
    for second in range(100):
        assert not worker.says_too_much(150, 1000.0 + second)
        assert not worker.says_too_much(50, 1000.9 + second)
    assert worker.says_too_much(1, 1099.95)
    assert not worker.says_too_much(200, 1101.0)
