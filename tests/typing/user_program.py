"""A program as users write it: type checkers find nothing wrong in it. Never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic

Floats = np.ndarray[Any, np.dtype[np.float32]]


def stores(gradients: Floats) -> Floats:
    kvstore_hvd.init()
    store = kvstore_hvd.Horovod()
    rank: int = store.rank
    workers: int = store.num_workers
    store.broadcast("w", mx.nd.ones((2,)), out=mx.nd.zeros((2,)))
    print(rank, workers, store.report(), kvstore_hvd.topology().local_rank)
    total: Floats = kvstore_hvd.allreduce(gradients, "total", op="average")
    largest: Floats = kvstore_hvd.allreduce(gradients, "largest", op="max")
    kvstore_hvd.barrier()
    return total + largest


def horovod(net: Any) -> float:
    hvd.init()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
    trainer.step(32)
    one: Any = mx.nd.ones((1,))  # MXNet has no types of its own
    loss = hvd.allreduce(one, name="loss", op=hvd.Average)
    everything = hvd.grouped_allreduce([loss, loss], op=hvd.Sum)
    rows = hvd.allgather(everything[0])
    evens = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    layer = hvd.SyncBatchNorm(in_channels=4, process_set=evens)
    with kvstore_hvd.Join([trainer]):
        layer(rows)
    return float(loss.asscalar()) if hvd.rank() == 0 else 0.0


@elastic.run
def train(state: elastic.GluonState, epochs: int, *, verbose: bool = False) -> list[float]:
    losses: list[float] = []
    for batch in batches(state.sampler):
        losses.append(float(batch))
        state.commit()
    return losses if verbose else losses[-epochs:]


def batches(sampler: Any) -> Iterator[float]:
    yield from (float(each) for each in sampler)


def main(net: Any) -> None:
    """Call the wrapped function as it was."""
    sampler = elastic.ElasticSampler([1, 2, 3], shuffle=True)
    state = elastic.GluonState(net=net, trainer=None, sampler=sampler, epoch=0)
    losses: list[float] = train(state, 3, verbose=True)
    everybody: list[float] = kvstore_hvd.run(horovod, args=(net,), np=2)
    print(losses, everybody)
    try:
        hvd.shutdown()
    except (kvstore_hvd.HorovodInternalError, kvstore_hvd.TimeoutError) as error:
        print(error)
