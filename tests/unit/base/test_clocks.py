"""Clocks that stand still while this process does."""

from __future__ import annotations

import pytest

from kvstore_hvd.base.clocks import LOOK_S, Deadline, RunningClock


class Time:
    """Stands for ``time.monotonic``."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("kvstore_hvd.base.clocks.time.monotonic", time)
    return time


def test_time_passes_while_it_is_looked_at(time: Time) -> None:
    clock = RunningClock()
    assert clock.now() == 100.0
    for _ in range(10):
        time.pass_by(LOOK_S)
        clock.now()
    assert clock.now() == pytest.approx(100.0 + 10 * LOOK_S)
    assert clock.elapsed() == pytest.approx(10 * LOOK_S)


def test_time_in_which_this_process_was_stopped_does_not_count(time: Time) -> None:
    clock = RunningClock()
    time.pass_by(0.1)
    assert clock.elapsed() == pytest.approx(0.1)
    time.pass_by(1000.0)
    assert clock.elapsed() == pytest.approx(0.2)
    time.pass_by(0.3)
    assert clock.elapsed() == pytest.approx(0.5)


def test_a_machine_under_load_does_not_stop_the_clock(time: Time) -> None:
    """A process that always comes late to its looks still comes to an end."""
    deadline = Deadline(10.0)
    for _ in range(101):
        time.pass_by(5.0)
        left = deadline.left()
    assert left <= 0
    assert deadline.wait_s() == 0


def test_an_earlier_deadline_counts_for_the_later_one(time: Time) -> None:
    """Somebody who waits for it looks at no other."""
    later = Deadline(10.0)
    for _ in range(2):
        earlier = later.within(4.0)
        while earlier.left() > 0:
            time.pass_by(0.5)
    assert later.left() == pytest.approx(2.0)
    assert later.within(4.0).left() == pytest.approx(2.0)
