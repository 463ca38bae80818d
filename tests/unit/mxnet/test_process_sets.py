"""What needs no world of `kvstore_hvd.mxnet`: how process sets are agreed on, names, and scales of trainers."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, MismatchError
from kvstore_hvd.mxnet import basics, mpi_ops, process_sets
from kvstore_hvd.mxnet.optimizer import DistributedTrainer, Scale
from kvstore_hvd.mxnet.process_sets import agreed_sets, row_of
from kvstore_hvd.store.keys import Call
from kvstore_hvd.world.topology import Host, Place


def judged(*rows):
    size = len(rows)
    table = np.array([np.concatenate(each) for each in rows])
    return agreed_sets(Call("init", Place.of(0, [Host("node", "a")] * size, source="launcher")), table)


def ranks(*named, size=4):
    return [row_of(named, size)]


def part(*named, size=4, **options):
    return [row_of(named, size, of_communicator=True, **options)]


def test_all_name_the_same():
    """Who is not in the communicator names nobody."""
    assert judged(*[ranks(2, 0)] * 4) == judged(part(0, 2), part(), part(0, 2), part()) == [[(0, 2)]]
    assert judged(part(0, 2), ranks(0, 2), part(0, 2), ranks()) == [[(0, 2)]]
    assert judged(*[[*ranks(2, 0), *ranks(3)]] * 4) == [[(0, 2)], [(3,)]]


@pytest.mark.parametrize("parts", [[(0, 2), (1, 3)], [(0,), (1,), (2,), (3,)], [(0, 3), (1,), (2,)], [(0, 1, 2, 3)]])
def test_each_names_its_part(parts):
    """In ascending order, as Horovod numbers them."""
    said = [part(*next(each for each in parts if rank in each)) for rank in range(4)]
    assert judged(*said) == [parts]
    assert judged(*[[*each, *ranks(1, 2)] for each in said]) == [parts, [(1, 2)]]


@pytest.mark.parametrize(
    ("said", "details"),
    [
        ([ranks(0, 1), ranks(0, 1), ranks(2, 3), ranks(2, 3)], "[0, 1]: ranks 0-1    [2, 3]: ranks 2-3"),  # by ranks
        ([part(0, 1), part(0, 1), part(2, 3), ranks(2, 3)], "[0, 1]: ranks 0-1    [2, 3]: ranks 2-3"),
        ([part(0, 1), part(0, 1), part(2), part()], "[2]: rank 2    no ranks: rank 3"),  # whose is the last one?
        ([part(0, 1), part(), part(0, 1), part()], "[0, 1]: ranks 0, 2    no ranks: ranks 1, 3"),  # of a member
        ([ranks(0, 9), ranks(0), ranks(0), ranks(0)], "[0, 9]: rank 0    [0]: ranks 1-3"),
    ],
)
def test_what_is_neither(said, details):
    with pytest.raises(MismatchError, match="init: the workers name different process sets") as caught:
        judged(*said)
    assert details in str(caught.value).replace("\n", "  ")


@pytest.mark.parametrize(("named", "foreign"), [((0, 4), 4), ((-1, 2), -1)])
def test_ranks_that_do_not_exist(named, foreign):
    with pytest.raises(InvalidRequestError, match=f"the set names rank {foreign}, but there are 4 workers"):
        judged(*[ranks(*named)] * 4)


def test_a_communicator_with_others_in_it():
    said = [part(0, 1, has_strangers=True), part(0, 1, has_strangers=True), part(2, 3), part(2, 3)]
    with pytest.raises(InvalidRequestError, match="processes that are none of the 4 workers"):
        judged(*said)


def test_names_of_the_modules():
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(each, name) for each in (basics, mpi_ops) for name in each.__all__)
    names = "init shutdown is_initialized size local_size cross_size rank local_rank cross_rank mpi_threads_supported"
    assert set(names.split()) <= set(mpi_ops.__all__)
    importlib.import_module("kvstore_hvd.mxnet.gathers")
    assert callable(hvd.alltoall)  # not hidden by a module


def test_process_sets_outside_of_a_world():
    assert (process_sets.process_sets(), process_sets.get_process_set_ids_and_ranks()) == ([], {})
    with pytest.raises(ValueError, match=r"there is no process set 1\.\n  Fix: use one of: none\."):
        process_sets.process_set_by_id(1)


def test_a_copied_scale_is_as_exact_as_the_original_in_every_world():
    """As AMP copies that of a `DistributedTrainer`: among 49 workers, and read where there is one again."""
    trainer = DistributedTrainer.__new__(DistributedTrainer)
    with pytest.raises(AttributeError, match="has no attribute '_amp_original_scale'"):
        trainer._amp_original_scale  # noqa: B018
    topology = SimpleNamespace(size=49, is_member=True)
    vars(trainer).update(_world=SimpleNamespace(topology=topology), _process_set=None, _scale=Scale(1.0, 1))
    assert trainer._scale == 1 / 49
    trainer._amp_original_scale = trainer._scale
    topology.size = 1
    assert trainer._amp_original_scale == trainer._scale == 1.0
    trainer._scale = 0.5
    assert (trainer._scale, trainer._amp_original_scale) == (0.5, 1.0)
    topology.size = 2
    assert (trainer._scale, trainer._amp_original_scale) == (0.25, 0.5)
