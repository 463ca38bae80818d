"""What the random programs and their model promise, without any world."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fuzz.model import Model
from fuzz.ordering import chains, order_of
from fuzz.programs import Operation, Program, generate


def run(program: Program, orders: list[list[Operation]]) -> bool:
    """Whether all ranks come to the end, where operations that wait do so for all that they need."""
    place = [0] * program.size
    arrived: dict[int, set[int]] = {operation.index: set() for operation in program.operations}
    needs: dict[int, set[int]] = {operation.index: set() for operation in program.operations}
    for chain in chains(program.operations):
        for first, second in zip(chain, chain[1:]):
            needs[second.index].add(first.index)

    def is_over(operation: Operation) -> bool:
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_order_makes_ranks_wait_for_each_other(size):
    """Whatever every rank draws for itself."""
    for seed in range(300):
        program = generate(seed, size)
        orders = [order_of(program, rank, random.Random(f"{seed} {rank}")) for rank in range(size)]
        for rank, order in enumerate(orders):
            own = [operation.index for operation in program.operations if rank in operation.members]
            assert sorted(operation.index for operation in order) == own
        assert run(program, orders), f"seed {seed}"


def test_an_order_that_hangs_is_seen():
    """The check above can fail: one rank waits before it submits what the other waits for."""
    first = Operation(0, "allreduce", (0, 1), "x")
    wait = Operation(1, "wait", (0, 1), source=0)
    last = Operation(2, "barrier", (0, 1))
    program = Program(0, 2, [], [first, wait, last])
    assert run(program, [[first, wait, last], [first, wait, last]])
    assert not run(program, [[first, wait, last], [last, first, wait]])


def model_of(operation: Operation) -> Model:
    """The model of a program of this operation."""
    return Model(Program(0, len(operation.members), [], [operation]))


def test_results_are_those_of_numpy():
    """A few results by hand: the model must not share a mistake with itself."""
    operation = Operation(0, "allreduce", (0, 1, 2), "x", "int8", [(5,)], op="average")
    model = model_of(operation)
    parts = [model.inputs(0, rank)[0][0] for rank in range(3)]
    total = (parts[0] + parts[1] + parts[2]).astype(np.int8)
    assert model.outputs(0, 1)[0].tolist() == [int(each / 3) for each in total]
    operation = Operation(0, "alltoall", (0, 1), "x", "float32", [(3,)], rows=[[3, 2]], splits=[[1, 2], [2, 0]])
    model = model_of(operation)
    parts = [model.inputs(0, rank)[0][0] for rank in range(2)]
    assert model.outputs(0, 0)[0].tolist() == [*parts[0][:1], *parts[1]]
    assert model.outputs(0, 1)[0].tolist() == parts[0][1:].tolist()
    assert (model.received(0, 0), model.received(0, 1)) == ([1, 2], [2, 0])
    operation = Operation(0, "reducescatter", (0, 1), "x", "float64", [(3, 2)], op="sum", postscale=0.5)
    model = model_of(operation)
    whole = (model.inputs(0, 0)[0][0] + model.inputs(0, 1)[0][0]) * 0.5
    assert model.outputs(0, 0)[0].tolist() == whole[:2].tolist()
    assert model.outputs(0, 1)[0].tolist() == whole[2:].tolist()
