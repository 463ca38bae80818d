"""What the workers say of process sets: one table, that all of them judge alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore_hvd.errors import InvalidRequestError, MismatchError
from kvstore_hvd.mxnet.set_agreement import agreed_sets, row_of
from kvstore_hvd.worlds.topology import Host, Topology


def judged(*rows: Sequence[Any]) -> Any:
    """Return what is agreed where each worker says these rows."""
    size = len(rows)
    table = np.array([np.concatenate(each) for each in rows])
    return agreed_sets(Topology.of(0, [Host("node", "a")] * size, source="launcher"), "init", table)


def ranks(*named: int, size: int = 4) -> list[Any]:
    """Return the row of a set that is named by its ranks."""
    return [row_of(named, size)]


def part(*named: int, size: int = 4, **options: bool) -> list[Any]:
    """Return the row of a set that is named by a communicator."""
    return [row_of(named, size, of_communicator=True, **options)]


def test_all_name_the_same() -> None:
    assert judged(*[ranks(2, 0)] * 4) == [[(0, 2)]]
    assert judged(*[[*ranks(2, 0), *ranks(3)]] * 4) == [[(0, 2)], [(3,)]]


def test_who_is_not_in_the_communicator_names_nobody() -> None:
    assert judged(part(0, 2), part(), part(0, 2), part()) == [[(0, 2)]]
    assert judged(part(0, 2), ranks(0, 2), part(0, 2), ranks()) == [[(0, 2)]]


@pytest.mark.parametrize("parts", [[(0, 2), (1, 3)], [(0,), (1,), (2,), (3,)], [(0, 3), (1,), (2,)], [(0, 1, 2, 3)]])
def test_each_names_its_part(parts: list[tuple[int, ...]]) -> None:
    """In ascending order, as Horovod numbers them."""
    said = [part(*next(each for each in parts if rank in each)) for rank in range(4)]
    assert judged(*said) == [parts]
    assert judged(*[[*each, *ranks(1, 2)] for each in said]) == [parts, [(1, 2)]]


@pytest.mark.parametrize(
    "said",
    [
        [ranks(0, 1), ranks(0, 1), ranks(2, 3), ranks(2, 3)],  # by ranks
        [part(0, 1), part(0, 1), part(2, 3), ranks(2, 3)],
        [part(0, 1), part(0, 1), part(2), part()],  # whose is the last one?
        [part(0, 1), part(0, 1), part(0, 1), part(3)],
        [part(0, 1), part(), part(0, 1), part()],  # a member that says nothing
        [ranks(0, 9), ranks(0), ranks(0), ranks(0)],
    ],
)
def test_what_is_neither(said: list[Any]) -> None:
    with pytest.raises(MismatchError, match="init: the workers name different process sets"):
        judged(*said)


@pytest.mark.parametrize(("named", "foreign"), [((0, 4), 4), ((7, 5), 5), ((-1, 2), -1), ((-3,), -3)])
def test_ranks_that_do_not_exist(named: tuple[int, ...], foreign: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"the set names rank {foreign}, but there are 4 workers"):
        judged(*[ranks(*named)] * 4)


def test_a_communicator_with_others_in_it() -> None:
    said = [part(0, 1, has_strangers=True), part(0, 1, has_strangers=True), part(2, 3), part(2, 3)]
    with pytest.raises(InvalidRequestError, match="processes that are none of the 4 workers"):
        judged(*said)
