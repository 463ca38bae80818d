"""What the random programs and their model promise, without any world; and what ranks record of tests."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from fuzz.model import Model
from fuzz.ordering import chains, order_of
from fuzz.programs import Operation, Program, generate
from support.rank_main import Recorder
from support.results import read


def run(program, orders):
    """Whether all ranks come to the end, where operations that wait do so for all that they need."""
    place = [0] * program.size
    arrived = {operation.index: set() for operation in program.operations}
    needs = {operation.index: set() for operation in program.operations}
    for chain in chains(program.operations):
        for first, second in zip(chain, chain[1:]):
            needs[second.index].add(first.index)

    def is_over(operation):
        before = [program.operations[index] for index in needs[operation.index]]
        alone = operation.kind == "wait" or arrived[operation.index] >= set(operation.members)
        return alone and all(is_over(each) for each in before)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                operation = order[place[rank]]
                moved = moved or rank not in arrived[operation.index]
                arrived[operation.index].add(rank)
                if operation.waits and not is_over(operation):
                    break
                moved = True
                place[rank] += 1
    return all(place[rank] == len(order) for rank, order in enumerate(orders))


@pytest.mark.parametrize("size", [2, 4])
def test_no_order_makes_ranks_wait_for_each_other(size):
    """Whatever every rank draws for itself; one that waits before it submits what the other waits for is seen."""
    for seed in range(300):
        program = generate(seed, size)
        orders = [order_of(program, rank, random.Random(f"{seed} {rank}")) for rank in range(size)]
        for rank, order in enumerate(orders):
            own = [operation.index for operation in program.operations if rank in operation.members]
            assert sorted(operation.index for operation in order) == own
        assert run(program, orders), f"seed {seed}"
    first, wait = Operation(0, "allreduce", (0, 1), "x"), Operation(1, "wait", (0, 1), source=0)
    last = Operation(2, "barrier", (0, 1))
    program = Program(0, 2, [], [first, wait, last])
    assert run(program, [[first, wait, last], [first, wait, last]])
    assert not run(program, [[first, wait, last], [last, first, wait]])


def test_results_are_those_of_numpy():
    """A few by hand: the model must not share a mistake with itself."""

    def model_of(operation):
        return Model(Program(0, len(operation.members), [], [operation]))

    model = model_of(Operation(0, "allreduce", (0, 1, 2), "x", "int8", [(5,)], op="average"))
    parts = [model.inputs(0, rank)[0][0] for rank in range(3)]
    total = (parts[0] + parts[1] + parts[2]).astype(np.int8)
    assert model.outputs(0, 1)[0].tolist() == [int(each / 3) for each in total]
    model = model_of(Operation(0, "alltoall", (0, 1), "x", "float32", [(3,)], rows=[[3, 2]], splits=[[1, 2], [2, 0]]))
    parts = [model.inputs(0, rank)[0][0] for rank in range(2)]
    assert model.outputs(0, 0)[0].tolist() == [*parts[0][:1], *parts[1]]
    assert model.outputs(0, 1)[0].tolist() == parts[0][1:].tolist()
    assert (model.received(0, 0), model.received(0, 1)) == ([1, 2], [2, 0])


def test_what_a_rank_records_of_its_tests(tmp_path):
    """Three at the same time, of which one fails and one is skipped; then a rank that does not come to its end."""

    def recorded(*ended, code=1):
        recorder = Recorder(tmp_path / "rank0.jsonl")
        for test in "abc":
            recorder.pytest_runtest_logstart(test)
        for test, outcome in ("a", "passed"), ("b", "failed"), ("c", "skipped"), ("b", "passed"), ("a", "passed"):
            of = {"failed": outcome == "failed", "skipped": outcome == "skipped", "longreprtext": "why"}
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=test, **of))
        for test in ended:
            recorder.pytest_runtest_logfinish(test)
        if code is not None:
            recorder.pytest_sessionfinish(None, code)
        return read(tmp_path, 1)

    results = recorded("c", "a", "b")
    assert results.outcomes == {"a": "passed", "b": "failed", "c": "skipped"}
    assert (results.problems, results.texts) == ([], {"b": ("why", [0])})
    results = recorded("b", code=None)
    assert results.outcomes == {"a": "failed", "b": "failed", "c": "failed"}
    assert results.problems == ["rank 0 did not come to its end (in a and c)"]
