"""`ElasticSampler`: every sample of an epoch exactly once, whatever becomes of the workers. Needs no other process."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest

from kvstore_hvd import elastic
from kvstore_hvd.errors import InvalidRequestError


def samplers(place, size, dataset, state=None, **options):
    made = []
    for rank in range(size):
        place(rank, size)
        made.append(elastic.ElasticSampler(dataset, **options))
        if state is not None:
            made[-1].load_state_dict(state)
    return made


def test_epochs_differ_and_workers_agree(place):
    orders = set()
    for epoch in range(4):
        world = samplers(place, 3, range(30), seed=1)
        for each in world:
            each.set_epoch(epoch)
        assert len({tuple(each.remaining_indices) for each in world}) == 1
        orders.add(tuple(world[0].remaining_indices))
    assert len(orders) == 4
    (again,) = samplers(place, 1, range(30), seed=1)
    assert tuple(again.remaining_indices) in orders
    (other,) = samplers(place, 1, range(30), seed=2)
    assert tuple(other.remaining_indices) not in orders
    (plain,) = samplers(place, 1, range(30), shuffle=False)
    assert list(plain) == list(range(30))
    (negative,) = samplers(place, 1, range(30), seed=-1)
    negative.set_epoch(-1)
    assert sorted(negative) == list(range(30))


def test_record_batch_counts_calls(place):
    """As Horovod's: each one is the next batch, whatever the program calls it, of the iteration that is under way."""
    for numbers in [[0, 0, 0], [7, -1, 10**20]]:
        world = samplers(place, 2, range(18), shuffle=False)
        for count, number in enumerate(numbers):
            for each in world:
                each.record_batch(number, 3)
                assert each.processed_indices == set(range(6 * (count + 1)))
    (one,) = samplers(place, 1, range(20), shuffle=False)
    for _ in range(2):
        assert list(one)[:4] == list(range(4))
        one.record_batch(0, 4)
    assert one.processed_indices == set(range(4))


def test_an_epoch_that_begins_again_is_told(place, caplog, fresh_log):
    (each,) = samplers(place, 1, range(10))
    for epoch, batches in ((0, 0), (0, 5), (0, 0), (1, 3), (2, 3)):
        each.set_epoch(epoch)
        for batch in range(batches):
            each.record_batch(batch, 2)
    assert caplog.text == ""
    each.set_epoch(2)
    assert "set_epoch(2) restarts the present epoch, in which 6 of 10 samples were already processed" in caplog.text


def test_more_batches_than_there_are(place, caplog, fresh_log):
    (one,) = samplers(place, 1, range(5))
    for number in range(4):
        one.record_batch(number, 4)
    assert one.processed_num == 5
    (record,) = caplog.records
    assert "all 5 samples of this worker have been recorded already" in record.getMessage()


def test_gathered_indices_count_once(place):
    for count in (10, 11, 12):  # the last row repeats samples of the first
        world = samplers(place, 3, range(count), seed=3)
        gathered = [index for each in world for index in each.indices[:3]]
        for each in world:
            each.record_indices(gathered)
        assert [each.processed_indices for each in world] == [set(gathered)] * 3


def test_states(place):
    """state_dict and load_state_dict: of all kinds, and sizes that are no multiple of eight."""
    (one,) = samplers(place, 1, range(13), seed=3)
    one.set_epoch(4)
    one.record_batch(0, 4)
    one.record_indices(one.get_indices(2, 4))
    state = one.state_dict()
    assert (state["epoch"], state["processed_num"]) == (4, 8)
    (other,) = samplers(place, 1, range(13), pickle.loads(pickle.dumps(state)), seed=3)
    assert (other.epoch, other.processed_indices) == (4, one.processed_indices)
    assert set(other) == set(range(13)) - one.processed_indices
    (older,) = samplers(place, 1, range(13), {"epoch": 4, "processed_indices": one.processed_indices}, seed=3)
    assert older.state_dict() == state
    (newer,) = samplers(place, 1, range(13), {"epoch": 4, "processed_num": 5}, seed=3)
    one.set_epoch(4)
    assert list(newer) == list(one)[5:]
    newer.load_state_dict({"processed_num": 3})
    assert (newer.epoch, list(newer)) == (4, list(one)[3:])


def test_refusals(place):
    (one,) = samplers(place, 1, range(10))
    one.record_batch(0, 3)
    before = one.state_dict()
    with pytest.raises(InvalidRequestError, match=r"\[rank 0/1\] ElasticSampler.record_batch: batch_size is "):
        one.record_batch(0, 0)
    for wrong in [(4, 3), (-1, 3), (0, 0)]:
        with pytest.raises(InvalidRequestError, match=r"\[rank 0/1\] ElasticSampler.get_indices: "):
            one.get_indices(*wrong)
    for number in (10, -1):
        with pytest.raises(InvalidRequestError, match=f"no sample {number} in a dataset of 10"):
            one.record_indices([0, number])
    wrong = [("epoch", 1), ("processed_mask", b"abc"), ("processed_mask", b"\xff\xff")]
    for name, value in [*wrong, ("processed_num", -1), ("processed_indices", {3, 10})]:
        with pytest.raises(InvalidRequestError, match="Fix: "):
            one.load_state_dict({"epoch": 1, name: value})
    assert one.state_dict() == before


@pytest.mark.parametrize(("workers", "batches"), [(0, True), (2, False)])
def test_loader_reads_ahead(place, workers, batches):
    """What it has read ahead does not count; the same epoch goes on with the rest."""
    gluon = pytest.importorskip("mxnet").gluon
    data = gluon.data.ArrayDataset(np.arange(50))
    (one,) = samplers(place, 1, data, seed=2)
    assert isinstance(one, gluon.data.Sampler)
    of_batches = {"batch_sampler": gluon.data.BatchSampler(one, 4, "keep")}
    how = of_batches if batches else {"sampler": one, "batch_size": 4}
    loader = gluon.data.DataLoader(data, num_workers=workers, **how)
    seen = []
    for number, batch in enumerate(loader):
        if number == 5:
            break
        seen += batch.asnumpy().tolist()
        one.record_batch(number, 4)
    assert one.processed_indices == set(seen)
    one.reset()
    assert len(loader) == 8
    for number, batch in enumerate(loader):
        seen += batch.asnumpy().tolist()
        one.record_batch(number, 4)
    assert sorted(seen) == list(range(50))
    assert one.processed_num == 50


def run_epoch(place, seed):
    """A random epoch; returns how often each sample was in a step that was kept, and what padding may have added."""
    choose = random.Random(seed)
    count = choose.choice([1, 2, 5, 17, 64, choose.randrange(1, 200)])
    options = {"shuffle": choose.random() < 0.8, "seed": choose.randrange(100)}
    committed = {"epoch": choose.randrange(3), "processed_num": 0}
    kept = Counter()
    world, padding, by_indices = [], 0, choose.random() < 0.3
    while committed["processed_num"] < count:
        # Another world: workers that stay restore what they committed, newcomers get it from rank 0.
        size = choose.randint(1, 9)
        stay = [each for each in world[:size] if choose.random() < 0.7]
        world = stay + samplers(place, size - len(stay), range(count), **options)
        for rank, each in enumerate(world):
            place(rank, size)
            each.load_state_dict(committed)
            assert (each.rank, each.num_replicas, each.total_size) == (rank, size, size * len(each))
        batch_size = choose.randint(1, 8)
        batches = [[each.indices[at : at + batch_size] for at in range(0, len(each), batch_size)] for each in world]
        since = Counter()
        for number in range(len(batches[0])):
            steps = [of_rank[number] for of_rank in batches]
            since.update(index for step in steps for index in step)
            for each in world:
                if by_indices:
                    each.record_indices(each.get_indices(number, batch_size))
                else:
                    each.record_batch(number, batch_size)
            assert all(each.state_dict() == world[0].state_dict() for each in world)
            what = choose.random()
            if what < 0.3:  # a commit
                committed, kept, since = world[0].state_dict(), kept + since, Counter()
            elif what < 0.4:  # a failure: what was not committed is lost
                break
            elif what < 0.5:  # an update: what was done is kept
                committed, kept, since = world[0].state_dict(), kept + since, Counter()
                break
        else:
            committed, kept = world[0].state_dict(), kept + since
        padding = size - 1
    return count, kept, padding


def test_every_sample_once_in_random_epochs(place):
    for seed in range(80):
        count, kept, padding = run_epoch(place, seed)
        assert set(kept) == set(range(count)), f"seed {seed}: a sample was left out"
        assert sum(kept.values()) - count <= padding, f"seed {seed}: samples were counted twice: {kept}"
