"""The order in which one rank submits a program's operations: any that cannot make ranks wait for each other in a ring.

Operations that wait come in the order of the program, on every rank. Others may come at any place, but:

- Operations on one array, and calls that are matched by counting, keep the order of the program.
- What an operation that waits needs from other ranks (the results of operations on its array) is submitted by all of
  them before they wait themselves for that operation or a later one.
"""

import random
from collections import defaultdict

from fuzz.programs import Operation, Program


def order_of(program: Program, rank: int, draw: random.Random) -> list[Operation]:
    """A random order of the operations that the rank is a member of."""
    own = [operation for operation in program.operations if rank in operation.members]
    before: dict[int, set[int]] = {operation.index: set() for operation in own}
    for chain in chains(program.operations):
        mine = [operation for operation in chain if rank in operation.members]
        for first, second in zip(mine, mine[1:]):
            before[second.index].add(first.index)
        for position, needed in enumerate(chain):
            # Of the chain the first one that waits, whoever does.
            waiting = next((each.index for each in chain[position + 1 :] if each.waits), None)
            if waiting is None or needed.waits or rank not in needed.members:
                continue
            for operation in own:
                if operation.waits and operation.index >= waiting:
                    before[operation.index].add(needed.index)
    waits = [operation for operation in own if operation.waits]
    for first, second in zip(waits, waits[1:]):
        before[second.index].add(first.index)
    order: list[Operation] = []
    left = {operation.index: operation for operation in own}
    while left:
        ready = [operation for index, operation in left.items() if not before[index] & left.keys()]
        order.append(left.pop(draw.choice(ready).index))
    return order


def chains(operations: list[Operation]) -> list[list[Operation]]:
    """Operations that belong in one order: on one array, or matched by counting."""
    chains: dict[object, list[Operation]] = defaultdict(list)
    for operation in operations:
        first = operation.index
        if operation.source is not None:
            source = operations[operation.source]
            first = source.index if source.source is None else source.source
        chains["array", first].append(operation)
        if operation.name is None and operation.kind != "wait":
            chains["unnamed", operation.kind.replace("sparse_", ""), operation.members].append(operation)
    return list(chains.values())
