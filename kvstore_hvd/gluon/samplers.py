"""Which samples of a dataset a worker takes: shares of an epoch, and of batches of a constant size."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import mxnet as mx
import numpy as np

from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.world import process

Indices = Any  # numpy.ndarray of int64


def shard(dataset: Any) -> Any:
    """This worker's share of a dataset: neighbouring samples, at most one more than another worker's.

    Parameters
    ----------
    dataset : mxnet.gluon.data.Dataset or sequence
        The same on all workers.

    Returns
    -------
    mxnet.gluon.data.Dataset
    """
    if not isinstance(dataset, mx.gluon.data.Dataset):
        dataset = mx.gluon.data.SimpleDataset(dataset)
    topology = process.current().topology
    return dataset.shard(topology.size, topology.rank)


class EpochSampler(mx.gluon.data.Sampler):
    """Base class: samples in an order that each epoch has of its own."""

    def __init__(self, length: Any, shuffle: bool, seed: int) -> None:
        self.length = len(length) if hasattr(length, "__len__") else operator.index(length)
        self.shuffle, self.seed, self.epoch = bool(shuffle), operator.index(seed), 0
        if self.length < 0:
            raise self._error("", f"length is {length}.", "pass len(dataset).")

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its number and the seed choose the order. Call it on every worker."""
        self.epoch = operator.index(epoch)

    def _order_of(self, epoch: int) -> Indices:
        """The samples of an epoch in order, as a ``numpy.ndarray`` of int64; the same on all workers."""
        if not self.shuffle:
            return np.arange(self.length)
        # The legacy generator's numbers are the same in all versions of NumPy.
        return np.random.RandomState([self.seed % 2**32, epoch % 2**32]).permutation(self.length)

    def _error(self, method: str, fact: str, fix: str) -> InvalidRequestError:
        operation = f"{type(self).__name__}{method and '.'}{method}"
        return InvalidRequestError(message(fact, **process.current().topology.prefix, operation=operation, fix=fix))


class DistributedSampler(EpochSampler):
    """Splits the samples of each epoch among the workers, for ``DataLoader(dataset, batch_size, sampler=...)``.

    Worker r of N takes samples r, r + N, r + 2N ... of the epoch's order. For jobs whose workers may change use
    `elastic.ElasticSampler` or `DistributedBatchSampler`.

    Parameters
    ----------
    length : int or sequence
        ``len(dataset)``, or the dataset; equal on all workers.
    shuffle : bool
        Whether each epoch has an order of its own, equal on all workers; see `set_epoch`.
    seed : int
        Chooses the orders; equal on all workers.
    last : str
        What becomes of the last ``length % N`` samples. ``'pad'``: the first samples are repeated until all workers
        have equally many. ``'discard'``: they are left out. ``'keep'``: some workers have one sample more, as for an
        evaluation without collectives in its steps, or in a `Join`.

    Raises
    ------
    InvalidRequestError
        `length` is negative, or `last` is none of these.
    """

    # By name: samplers that programs have written take the number of workers and the rank there.
    def __init__(self, length: Any, *, shuffle: bool = True, seed: int = 0, last: str = "pad") -> None:
        super().__init__(length, shuffle, seed)
        if last not in ("pad", "discard", "keep"):
            raise self._error("", f"last is {last!r}.", "pass 'pad', 'discard' or 'keep'.")
        self.last = last

    def __iter__(self) -> Iterator[int]:
        topology, order = process.current().topology, self._order_of(self.epoch)
        if self.last != "keep":
            order = np.resize(order, len(self) * topology.size)
        return iter(order[topology.rank :: topology.size].tolist())

    def __len__(self) -> int:
        topology = process.current().topology
        more = {"pad": topology.size - 1, "discard": 0, "keep": topology.size - 1 - topology.rank}[self.last]
        return (self.length + more) // topology.size


class DistributedBatchSampler(EpochSampler):
    """Batches of a constant size for all workers together, for ``DataLoader(dataset, batch_sampler=...)``.

    Step k of an epoch has the same samples with any number of workers: a training takes the same steps, but for
    rounding, and goes on with the same ones when workers are lost or come. A worker takes its share of each batch, of
    neighbouring samples; shares differ by one sample where the number of workers does not divide the batch. So divide
    by the samples of all workers, and never by those of this one: ``trainer.step(sampler.size_of(number))`` with a
    store, ``trainer.step(sampler.size_of(number) / hvd.size())`` with a `DistributedTrainer`.

    In an elastic job pass it to a `GluonState`, and call `record_batch` after each step.

    Parameters
    ----------
    length, shuffle, seed
        As `DistributedSampler`.
    global_batch_size : int
        Samples of a step on all workers together.
    last : str
        What becomes of a last batch with fewer samples: ``'keep'`` or ``'discard'``. Shares are empty where there are
        more workers than samples: a DataLoader does not take them, so discard that batch, or iterate over the sampler
        itself.

    Attributes
    ----------
    processed : int
        Batches of this epoch that were recorded.

    Raises
    ------
    InvalidRequestError
        `length` is negative, `global_batch_size` is no positive number, or `last` is none of these.
    """

    def __init__(
        self, length: Any, global_batch_size: int, *, shuffle: bool = True, seed: int = 0, last: str = "keep"
    ) -> None:
        super().__init__(length, shuffle, seed)
        if last not in ("keep", "discard"):
            raise self._error("", f"last is {last!r}.", "pass 'keep' or 'discard'.")
        self.global_batch_size, self.processed = operator.index(global_batch_size), 0
        if self.global_batch_size < 1:
            raise self._error("", f"global_batch_size is {global_batch_size}.", "pass a positive number.")
        size = self.global_batch_size
        self._count = self.length // size if last == "discard" else -(-self.length // size)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with no batch recorded: its number and the seed choose the order. Call it on every worker."""
        super().set_epoch(epoch)
        self.processed = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this worker's share of each batch that is not recorded yet."""
        topology, order = process.current().topology, self._order_of(self.epoch)
        for number in range(self.processed, self._count):
            begin = number * self.global_batch_size
            batch = order[begin : begin + self.global_batch_size]
            bounds = [len(batch) * rank // topology.size for rank in (topology.rank, topology.rank + 1)]
            yield batch[bounds[0] : bounds[1]].tolist()

    def __len__(self) -> int:
        return max(0, self._count - self.processed)

    def size_of(self, number: int) -> int:
        """Return how many samples batch `number` of an epoch, counted from 0, has on all workers together."""
        return min(self.global_batch_size, self.length - number * self.global_batch_size)

    def record_batch(self) -> None:
        """Record that the next batch was processed, on all workers alike: an iteration that begins later omits it."""
        self.processed += 1

    def state_dict(self) -> dict[str, int]:
        """The state for `load_state_dict`."""
        return {"epoch": self.epoch, "processed": self.processed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a `state_dict`."""
        self.epoch, self.processed = state_dict["epoch"], state_dict["processed"]
