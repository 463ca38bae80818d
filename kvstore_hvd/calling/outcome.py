"""How a job that has called a function came out: the results of all ranks, or an error that says why there are none."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.calling.failure import Failure
from kvstore_hvd.calling.reports import Kind, Report, Sender
from kvstore_hvd.errors import LaunchError, RunError, message, rank_list

__all__ = ["Outcome"]


class Outcome:
    """Collects the reports of one job. A context manager, which lets go of their files."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], Report] = {}  # by generation and place
        self._failures: list[tuple[Sender, Failure]] = []  # in the order in which they came
        self._refusal = ""
        self._reason = ""  # the launcher's, why the job has failed

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, *exception: object) -> None:
        for report in self._results.values():
            report.close()

    def hear(self, report: Report) -> None:
        """Take a report."""
        sender = report.sender
        if report.kind is Kind.RESULT:
            self._results[sender.generation, sender.place] = report  # large ones are read once all are there
            return
        try:
            value = report.value()
        finally:
            report.close()
        if report.kind is Kind.FAILED:
            self._failures.append((sender, value))
        elif report.kind is Kind.REFUSED:
            self._refusal = value
        else:
            self._reason = value

    def results(self, code: int) -> list[Any]:
        """What the function has returned on each rank of the last world."""
        if self._refusal:
            raise LaunchError(self._refusal)
        if code != 0 or self._reason:  # a program that ignores SIGCHLD does not learn the code
            raise self._error(code)
        last = max((generation for generation, _ in self._results), default=-1)
        chosen = {place: report for (generation, place), report in self._results.items() if generation == last}
        missing = sorted(set(range(_size(list(chosen.values())))) - set(chosen))
        if missing or not chosen:
            raise self._error(code, missing)
        return [_value(chosen[place]) for place in sorted(chosen)]

    def _error(self, code: int, missing: list[int] | None = None) -> RunError:
        """Why there are no results. The first failure that was not another's consequence comes first."""
        latest = max((sender.generation for sender, _ in self._failures), default=-1)
        failures = [each for each in self._failures if each[0].generation == latest]
        if failures:
            sender, failure = next((each for each in failures if not each[1].is_secondary), failures[0])
            return _failed(sender, failure, self._reason if sender.worker is not None else "")
        if self._reason:
            return RunError(message(self._reason, operation="run", fix="see what it has written."))
        if code == 0:
            who = rank_list(missing) if missing else "the workers"
            fact = f"{who} ended without a result, and without an error."
            return RunError(message(fact, operation="run", fix="let the function return; os._exit leaves no time to."))
        how = f"with code {code}" if code > 0 else f"by signal {-code}"
        fix = "see what it has written; somebody may have ended it."
        return RunError(message(f"the launcher (kvhvdrun) ended {how}.", operation="run", fix=fix))


def _size(reports: list[Report]) -> int:
    """Of the world that these come from; 0 when they come from none."""
    return max((each.sender.size for each in reports if each.sender.is_of_world), default=0)


def _failed(sender: Sender, failure: Failure, reason: str) -> RunError:
    heading = [f"on {sender}:"] if failure.trace else []
    details = [*reason.splitlines(), *heading, *failure.trace.splitlines()]
    fix = failure.fix or "correct what the traceback shows."
    rank, size = (sender.rank, sender.size) if sender.is_of_world else (None, None)
    error = RunError(message(failure.fact, rank=rank, size=size, operation="run", details=details, fix=fix))
    error.__cause__ = failure.error()
    return error


def _value(report: Report) -> Any:
    try:
        return report.value()
    except Exception as error:
        fact = f"the result of {report.sender} cannot be read here: {type(error).__name__}: {error}."
        fix = "return objects whose modules can be imported in this program, too."
        raise RunError(message(fact, operation="run", fix=fix)) from error
