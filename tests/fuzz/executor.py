"""Runs programs on this rank, through `kvstore_hvd.mxnet` and stores, and compares with the model what comes back."""

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

import mxnet as mx
import numpy as np

import kvstore_hvd.mxnet as hvd
from fuzz.arrays import Arrays, read
from fuzz.calls import Calls
from fuzz.model import Model, checksum
from fuzz.ordering import order_of
from fuzz.programs import Operation, Program
from kvstore_hvd.errors import HorovodInternalError, InputFailedError, InvalidRequestError, MismatchError
from support.patience import patient

MOST_SETS = 5
LIMIT_S = patient(10.0)


class Outcome:
    """What this rank found in one program: `problems` for people, and `checksums` of results, by operation."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.checksums: dict[int, int] = {}


class Executor:
    """Runs programs one after the other, in one world; all ranks have to run the same ones."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._sets: dict[tuple[int, ...], Any] = {}
        self._calls = Calls(rank, size, self._set_of)

    def run(self, program: Program, before_step: Callable[[int], None] = lambda step: None) -> Outcome:
        """Run a program; `before_step` is called before each operation with its number in this rank's order."""
        self.register(program)
        return _Run(program, self._rank, self._calls, random.Random(f"{program.seed} on {self._rank}")).run(before_step)

    def close(self) -> None:
        for each in self._sets.values():
            hvd.remove_process_set(each)
        self._sets = {}

    def _set_of(self, members: tuple[int, ...]) -> Any:
        return hvd.global_process_set if len(members) == self._size else self._sets[members]

    def register(self, program: Program) -> None:
        """Make the sets that the program needs; the least recently used go."""
        for members in program.sets:
            known = self._sets.pop(members, None)
            self._sets[members] = known or hvd.add_process_set(random.sample(members, len(members)))
        while len(self._sets) > MOST_SETS:
            oldest = next(iter(self._sets))
            assert hvd.remove_process_set(self._sets.pop(oldest))
        if program.wrong_set:
            self._refuse_set(program.wrong_set)

    def _refuse_set(self, wrong: str) -> None:
        last = self._rank == self._size - 1
        known = next(iter(self._sets.values()), None)
        if wrong == "remove" and known is None:
            return
        calls: dict[str, tuple[Callable[[Any], Any], Any, type[Exception]]] = {
            "foreign": (hvd.add_process_set, [0, self._size], InvalidRequestError),
            "empty": (hvd.add_process_set, [], InvalidRequestError),
            "twice": (hvd.add_process_set, list(range(self._size))[::-1], InvalidRequestError),
            "different": (hvd.add_process_set, [0] if last else [0, self._size - 1], MismatchError),
            "remove": (hvd.remove_process_set, hvd.global_process_set if last else known, MismatchError),
        }
        call, argument, expected = calls[wrong]
        try:
            call(argument)
        except expected:
            return
        raise AssertionError(f"a wrong set was taken: {wrong}")


class _Run:
    """One program on this rank."""

    def __init__(self, program: Program, rank: int, calls: Calls, draw: random.Random) -> None:
        self._program, self._rank, self._calls, self._draw = program, rank, calls, draw
        self._model = Model(program)
        self._arrays: dict[int, Arrays] = {}
        self._outcome = Outcome()
        self._seen: dict[int, list[Exception]] = {}
        self._others = 0  # operations that failed too, by the words of an error

    def run(self, before_step: Callable[[int], None]) -> Outcome:
        order = order_of(self._program, self._rank, self._draw)
        foreign = [each for each in self._program.operations if each.outsiders and self._rank not in each.members]
        for step, operation in enumerate(order):
            before_step(step)
            if foreign and self._draw.random() < 0.5:
                self._call_as_outsider(foreign.pop())
            self._submit(operation)
        before_step(len(order))
        for operation in foreign:
            self._call_as_outsider(operation)
        for operation in self._draw.sample(order, len(order)):
            if operation.index in self._arrays:
                self._compare(operation)
        self._ask_for_errors()
        with self._errors(None):
            mx.nd.waitall()
        # Of several arrays of one operation some may have failed without being read.
        for members in {each.members for each in self._failing()}:
            with self._errors(None):
                self._calls.check(members)
        self._check_faults()
        return self._outcome

    def _submit(self, operation: Operation) -> None:
        if operation.kind == "wait":
            assert operation.source is not None
            awaited = self._arrays[operation.source].first
            if awaited is not None:  # of an empty group there is none, and none is returned with an error
                self._read(awaited, operation)
            return
        fault = operation.fault if operation.fault and operation.fault.culprit == self._rank else None
        if operation.clock:
            time.sleep(operation.clock[operation.members.index(self._rank)])
        if fault is not None and fault.kind == "arguments":
            self._call_with_wrong_arguments(operation)
        source = None if operation.source is None else self._arrays[operation.source].first
        with self._errors(operation):
            arrays = self._calls.prepare(operation, self._model, self._draw, fault, source)
            # Before the call, which may tell of an earlier error when it has submitted.
            self._arrays[operation.index] = arrays
            self._calls.submit(operation, arrays, self._draw, fault)
        if operation.index in self._arrays:
            for error in self._arrays[operation.index].errors:
                self._note(error, operation)

    def _call_as_outsider(self, operation: Operation) -> None:
        try:
            self._calls.call_as_outsider(operation)
        except InvalidRequestError as error:
            if "not one of the members" not in str(error):
                self._problem(operation, f"an outsider was told {error}")
        else:
            self._problem(operation, "an outsider was not refused")

    def _call_with_wrong_arguments(self, operation: Operation) -> None:
        try:
            self._calls.call_with_wrong_arguments(operation, self._draw)
        except HorovodInternalError:
            raise
        except (TypeError, ValueError) as error:
            if "Fix: " not in str(error):
                self._problem(operation, f"no fix is given: {error}")
        else:
            self._problem(operation, "wrong arguments were taken")

    def _compare(self, operation: Operation) -> None:
        arrays = self._arrays[operation.index]
        for array, expected, what in self._draw.sample(arrays.expected, len(arrays.expected)):
            if operation.overwritten and array is arrays.first:
                continue
            actual = self._read(array, operation)
            if expected is None:
                continue
            # Alone, MXNet's operators scale: they keep another NaN.
            difference = _difference(actual, expected, any_nan=len(operation.members) == 1)
            if difference:
                self._problem(operation, f"{what}: {difference}")
        for difference in arrays.differences:
            self._problem(operation, difference)
        if arrays.is_replicated and not operation.fails and not operation.overwritten and arrays.results:
            results = [self._read(each, operation) for each in arrays.results]
            self._outcome.checksums[operation.index] = checksum(results)

    def _read(self, array: Any, operation: Operation) -> Any:
        for _ in range(8):
            with self._errors(operation):
                return read(array)
        self._problem(operation, "an array raises an error at every read")
        return None

    @contextlib.contextmanager
    def _errors(self, operation: Optional[Operation]) -> Iterator[None]:
        """Note errors that belong to a fault; others are problems."""
        try:
            yield
        except HorovodInternalError:
            raise
        except Exception as error:
            self._note(error, operation)

    def _note(self, error: Exception, operation: Optional[Operation]) -> None:
        text = str(error)
        faulty = self._failing()
        named = [each for each in faulty if f"'{each.name}'" in text or f"'{each.name}." in text]
        # What fails on the culprit's own side may be an error of MXNet's that knows no names.
        own = [each for each in faulty if each.fault and each.fault.culprit == self._rank]
        own = [each for each in own if each.fault and each.fault.kind in ("input", "refused")]
        if operation is not None and operation in own:
            own = [operation]
        told = named or own[:1]
        for each in told:
            # The class is that of the first.
            self._seen.setdefault(each.index, []).extend([error] if len(told) == 1 else [])
        self._others += sum(int(count) for count in re.findall(r"\((\d+) other operations? failed too\.\)", text))
        if not told:
            self._problem(operation, f"unexpected {type(error).__name__}: {error}")

    def _failing(self) -> list[Operation]:
        return [each for each in self._program.operations if each.fails and self._rank in each.members]

    def _silent(self) -> list[Operation]:
        """The failing operations of which no error has told yet."""
        return [each for each in self._failing() if each.index not in self._seen]

    def _ask_for_errors(self) -> None:
        """Wait for errors that no read has raised: their arrays were lost, or they were taken by a call that failed."""
        deadline = time.monotonic() + LIMIT_S
        while len(self._silent()) > self._others and time.monotonic() < deadline:
            for operation in self._silent():
                with self._errors(None):
                    self._calls.check(operation.members)
            time.sleep(0.001)

    def _check_faults(self) -> None:
        silent = self._silent()
        for operation in self._program.operations:
            for error in self._seen.get(operation.index, []):
                expected = self._expected_error(operation)
                if not isinstance(error, expected):
                    self._problem(operation, f"{type(error).__name__} instead of {expected.__name__}: {error}")
        if len(silent) > self._others:
            for operation in silent:
                self._problem(operation, "the fault was not reported")

    def _expected_error(self, operation: Operation) -> type[Exception]:
        fault = operation.fault
        assert fault is not None
        if fault.kind in ("input", "refused") and fault.culprit == self._rank:
            return Exception
        return {"input": InputFailedError, "refused": InvalidRequestError}.get(fault.kind, MismatchError)

    def _problem(self, operation: Optional[Operation], text: str) -> None:
        self._outcome.problems.append(f"[rank {self._rank}] {operation or 'end of the program'}: {text}")


def _difference(actual: Any, expected: Any, any_nan: bool) -> str:
    """What differs, in words; '' for nothing. Arrays are compared bit by bit, but for NaNs where any will do."""
    if actual is None:
        return "there is no result"
    if any_nan and actual.shape == expected.shape and actual.dtype.kind == "f":
        actual = np.where(np.isnan(actual), expected.dtype.type(np.nan), actual).astype(actual.dtype)
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {actual.shape} instead of {expected.dtype} {expected.shape}"
    if actual.tobytes() == expected.tobytes():
        return ""
    kind = np.dtype(f"u{actual.dtype.itemsize}")
    flat, wanted = np.ascontiguousarray(actual).reshape(-1), np.ascontiguousarray(expected).reshape(-1)
    wrong = np.flatnonzero(flat.view(kind) != wanted.view(kind))
    shown = ", ".join(f"[{i}] {flat[i]!r} instead of {wanted[i]!r}" for i in wrong[:3])
    return f"{wrong.size} of {actual.size} elements differ: {shown}"
