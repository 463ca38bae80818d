"""States of elastic training among workers: everything is rank 0's after a sync, and updates reach all of them."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.elastic import ElasticSampler, HostsUpdatedInterrupt, HostUpdateResult, ObjectState

mx = pytest.importorskip("mxnet")


def test_objects_are_those_of_rank_0(rank, size):
    """ObjectState.sync: all attributes, as rank 0 committed them."""
    state = ObjectState(epoch=0, history=[], table=np.zeros(3))
    state.epoch = 10 + rank
    state.history.append(rank)
    state.table += rank + 1
    state.commit()
    state.epoch = 20 + rank
    state.sync()
    assert (state.epoch, state.history) == (10, [0])
    assert state.table.tolist() == [1, 1, 1]
    state.history.append("not committed")
    state.restore()
    assert state.history == [0]


@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_an_update_reaches_all(rank, size, who):
    """check_host_updates: whoever is told, all workers are interrupted, and once."""
    state = ObjectState(step=0)
    state.commit()
    if {"first": rank == 0, "last": rank == size - 1, "all": True}[who]:
        state.on_hosts_updated(5, HostUpdateResult.added)
    state.step = 3 + rank
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync is False
    state.restore()
    assert state.step == 3 + rank
    state.commit()
    # Told late of what all know: nobody is interrupted.
    if rank == 0:
        state.on_hosts_updated(5, HostUpdateResult.added)
    state.commit()


def test_updates_add_up_over_the_workers(rank, size):
    """check_host_updates: the newest update counts, and what any worker was told; only removals skip the sync."""
    state = ObjectState()
    state.on_hosts_updated(1 + rank, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.commit()
    assert raised.value.skip_sync is True
    state.on_hosts_updated(size, HostUpdateResult.added)  # as new as the last one, whatever this worker was told
    state.commit()
    state.on_hosts_updated(size + 1, HostUpdateResult.removed)
    if rank == size - 1:
        state.on_hosts_updated(size + 1, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.commit()
    assert raised.value.skip_sync is False


def test_a_newcomer_knows_of_fewer_updates(rank, size):
    """check_host_updates: workers that have seen different updates before agree nevertheless."""
    state = ObjectState()
    if rank == 0:
        state._updates._last = 7
    state.on_hosts_updated(6, HostUpdateResult.added)
    if size == 1:
        state.commit()
        return
    state.commit()
    if rank == size - 1:
        state.on_hosts_updated(8, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


def test_samplers_split_an_epoch(rank, size):
    """ElasticSampler: ranks and their number are those of the world; together they have every sample."""
    sampler = ElasticSampler(range(23), seed=4)
    assert (sampler.rank, sampler.num_replicas) == (rank, size)
    taken = hvd.allgather_object(list(sampler))
    assert {index for each in taken for index in each} == set(range(23))
    assert sum(map(len, taken)) == -(-23 // size) * size
    sampler.record_batch(0, 2)
    assert len({str(each) for each in hvd.allgather_object(sampler.state_dict())}) == 1
    assert sampler.processed_num == min(23, 2 * size)
