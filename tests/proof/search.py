"""Exhaustive search of a graph of states: all that can be reached, the shortest way to a bad state, and whether each
state can reach an end (AG EF end)."""

import gc
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

State = int
Moves = Callable[[State], Iterable[tuple[Any, State]]]  # a move and the next state; raises AssertionError at a bad one


class Result(NamedTuple):
    states: int
    edges: int
    ends: int
    seconds: float
    fault: str  # the way to a bad state; empty: there is none

    def __str__(self) -> str:
        return f"{self.states:,} states, {self.edges:,} edges, {self.ends:,} ends, {self.seconds:.1f} s"


def search(
    root: State,
    moves: Moves,
    is_end: Callable[[State], bool],
    name: Callable[[State, Any], str],
    show: Callable[[State], str],
    limit: int,
) -> Result:
    """Search all states, breadth first; more than `limit` of them are a fault, as some would not be looked at."""
    start, edges, ends = time.monotonic(), 0, array("l")
    numbers, states, parents = {root: 0}, array("Q", [root]), array("l", [0])
    sources, targets = array("l"), array("l")
    gc.collect()
    gc.disable()  # the states are no garbage

    def result(fault: str = "") -> Result:
        gc.enable()
        return Result(len(states), edges, len(ends), time.monotonic() - start, fault)

    def way_to(number: int, last: str) -> str:
        way = [number]
        while way[-1]:
            way.append(parents[way[-1]])
        way.reverse()
        steps = [(states[a], states[b]) for a, b in zip(way, way[1:])]
        names = [name(a, next(move for move, state in moves(a) if state == b)) for a, b in steps]
        lines = [f"{text:28} {show(states[each])}" for text, each in zip(["", *names], way)]
        return "\n".join((*lines, last))

    number = 0
    while number < len(states):
        if is_end(states[number]):
            ends.append(number)
            number += 1
            continue
        if len(states) > limit:
            return result(f"more than {limit:,} states: {len(states) - number:,} of them have not been looked at")
        try:
            for _, state in moves(states[number]):
                known = numbers.get(state)
                if known is None:
                    known = numbers[state] = len(states)
                    states.append(state)
                    parents.append(number)
                sources.append(number)
                targets.append(known)
                edges += 1
        except AssertionError as error:
            return result(way_to(number, str(error)))
        number += 1
    stuck = _cannot_reach(ends, sources, targets, len(states))
    return result(way_to(stuck, "from here the job cannot reach an end") if stuck >= 0 else "")


def _cannot_reach(ends: "array[int]", sources: "array[int]", targets: "array[int]", count: int) -> int:
    """The first state that cannot reach an end, or -1: edges are followed backwards from the ends."""
    # Edges by target: those of target t are before[starts[t] : starts[t + 1]].
    starts = array("l", bytes(8 * (count + 2)))
    for target in targets:
        starts[target + 2] += 1
    for target in range(2, count + 2):
        starts[target] += starts[target - 1]
    before = array("l", bytes(8 * len(targets)))
    for source, target in zip(sources, targets):
        before[starts[target + 1]] = source
        starts[target + 1] += 1
    can, pending = bytearray(count), list(ends)
    for end in ends:
        can[end] = 1
    while pending:
        target = pending.pop()
        for source in before[starts[target] : starts[target + 1]]:
            if not can[source]:
                can[source] = 1
                pending.append(source)
    return can.find(0)
