"""`DistributedSampler` and `DistributedBatchSampler`: whose each sample is. Needs no other process."""

import random
from collections import Counter

import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.errors import InvalidRequestError


def on_workers(place, size, call):
    found = []
    for rank in range(size):
        place(rank, size)
        found.append(call())
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("last", ["pad", "discard", "keep"])
def test_every_sample_of_an_epoch_once(place, last, shuffle):
    """Shares are equal; 'pad' repeats fewer than one sample for each worker, 'discard' omits fewer."""
    for length in range(12):
        for size in range(1, 6):
            sampler, orders = hvd.DistributedSampler(range(length), shuffle=shuffle, seed=3, last=last), []
            for epoch in range(3):
                sampler.set_epoch(epoch)
                shares = on_workers(place, size, lambda: (list(sampler), len(sampler)))  # noqa: B023 - at once
                assert all(len(share) == told for share, told in shares)
                taken = Counter(sample for share, _ in shares for sample in share)
                assert set(taken) <= set(range(length))
                lengths = {len(share) for share, _ in shares}
                assert len(lengths) == 1 or (last == "keep" and max(lengths) == min(lengths) + 1)
                if last == "discard":
                    assert (max(taken.values(), default=1), length - len(taken)) == (1, length % size)
                else:
                    assert len(taken) == length
                    assert 0 <= sum(taken.values()) - length < (size if last == "pad" else 1)
                orders.append([sample for share, _ in shares for sample in share])
            assert shuffle or orders[0] == orders[1]
            assert not shuffle or length < 6 or orders[0] != orders[1]


def test_a_share_of_a_dataset(place):
    for size in (1, 2, 3, 5):
        shares = on_workers(place, size, lambda: hvd.shard([*"abcd"]))
        assert [share[at] for share in shares for at in range(len(share))] == [*"abcd"]
        assert {len(share) for share in shares} <= {4 // size, 4 // size + 1}


def test_batches_are_the_same_with_any_number_of_workers(place):
    """Also where workers come and go between two batches; shares differ by one sample at most."""
    draw = random.Random(2)
    for _ in range(100):
        length, batch, epoch = draw.randrange(40), draw.randint(1, 9), draw.randrange(3)
        place(0, 1)
        alone = hvd.DistributedBatchSampler(length, batch, seed=7)
        alone.set_epoch(epoch)
        expected = list(alone)
        assert sorted(sample for one in expected for sample in one) == list(range(length))
        assert [alone.size_of(number) for number in range(len(alone))] == list(map(len, expected))
        whole = hvd.DistributedBatchSampler(length, batch, seed=7, last="discard")
        whole.set_epoch(epoch)
        assert (list(whole), len(whole)) == ([one for one in expected if len(one) == batch], length // batch)
        assert [len(one) for one in expected[:-1]] == [batch] * (len(expected) - 1)
        sampler, found = hvd.DistributedBatchSampler(length, batch, seed=7), []
        sampler.set_epoch(epoch)
        while len(found) < len(expected):
            assert len(sampler) == len(expected) - len(found)
            shares = on_workers(place, draw.randint(1, 5), lambda: list(sampler))  # noqa: B023 - at once
            for parts in list(zip(*shares))[: draw.randint(1, 3)]:
                sampler.record_batch()
                found.append([sample for part in parts for sample in part])
                assert max(map(len, parts)) - min(map(len, parts)) <= 1
            state, sampler = sampler.state_dict(), hvd.DistributedBatchSampler(length, batch, seed=7)
            sampler.load_state_dict(state)
        assert found == expected
        assert (len(sampler), list(sampler)) == (0, [])


def test_an_elastic_state_keeps_the_place_in_the_epoch(place):
    place(0, 1)
    sampler = hvd.DistributedBatchSampler(10, 4, shuffle=False)
    state = elastic.GluonState(sampler=sampler)
    sampler.record_batch()
    state.save()
    sampler.record_batch()
    state.restore()
    assert list(sampler) == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hvd.DistributedSampler(-1), "DistributedSampler: length is -1"),
        (lambda: hvd.DistributedSampler(3, last="rollover"), "DistributedSampler: last is 'rollover'"),
        (lambda: hvd.DistributedBatchSampler(3, 0), "DistributedBatchSampler: global_batch_size is 0"),
        (lambda: hvd.DistributedBatchSampler(3, 1, last="pad"), "DistributedBatchSampler: last is 'pad'"),
    ],
)
def test_arguments_that_are_refused(place, make, text):
    with pytest.raises(InvalidRequestError, match=text):
        make()
