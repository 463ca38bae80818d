"""The sampler that splits an epoch among workers that come and go, each sample exactly once."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore_hvd import log
from kvstore_hvd.gluon.samplers import EpochSampler
from kvstore_hvd.world import process


class ElasticSampler(EpochSampler):
    """Splits the samples of a dataset among the workers, and remembers the processed ones.

    In every world the remaining samples are dealt out in *rows*, one sample for each worker; an incomplete last row is
    filled with the first remaining samples. All workers take equally many samples in a step, so each worker knows the
    samples that the others have processed, including workers that are lost later. Samples that a loader has prefetched
    count only once they are recorded.

    Pass it to ``DataLoader(dataset, batch_size, sampler=...)`` or to a ``BatchSampler``; not with ``'rollover'``, whose
    batches mix epochs. A `GluonState` saves, restores and synchronises it, and adapts it to each new world.

    Parameters
    ----------
    dataset : sequence
        Only ``len(dataset)`` is used, which is equal on all workers.
    shuffle : bool
        Whether each epoch has an order of its own, equal on all workers.
    seed : int
        Chooses the orders; equal on all workers.

    Attributes
    ----------
    epoch : int
        See `set_epoch`.
    rank, num_replicas : int
        This worker's rank, and the number of workers.
    num_samples, total_size : int
        The number of this worker's samples in the present world, and of all workers' together, including repeated
        samples that fill the last row.
    """

    def __init__(self, dataset: Sequence[Any], shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(len(dataset), shuffle, seed)
        self.dataset = dataset
        self._begin(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with nothing processed; its number and the seed choose the order.

        Call it at the end of the previous epoch, on every worker. At the beginning of an epoch, it would restart an
        epoch that is being continued in a new world.
        """
        epoch = operator.index(epoch)
        if epoch == self.epoch and 0 < self.processed_num < self.length:
            text = (
                "ElasticSampler.set_epoch(%d) restarts the present epoch, in which %d of %d samples were already "
                "processed; call it once, at the end of an epoch, with the number of the next one."
            )
            samples = self.processed_num, self.length
            log.once("sampler-epoch-again", logging.WARNING, text, epoch, *samples)
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._processed = np.zeros(self.length, bool)
        self._order = self._order_of(epoch)
        self.reset()

    def reset(self) -> None:
        """Deal out the rest of the epoch among the workers of the present world."""
        topology = process.current().topology
        self.rank, self.num_replicas = topology.rank, topology.size
        self._remaining = self._order[~self._processed[self._order]]
        self.num_samples = -(-len(self._remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # numpy.resize repeats the samples until the last row is full.
        self._rows = np.resize(self._remaining, (self.num_samples, self.num_replicas))
        self._indices: list[int] | None = None
        self._row_of: dict[int, int] | None = None
        self._recorded = 0  # rows that `record_batch` has counted in this iteration

    def __iter__(self) -> Iterator[int]:
        self._recorded = 0
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def indices(self) -> list[int]:
        """This worker's samples since the present world began, including those that fill the last row."""
        if self._indices is None:  # made on demand: it takes longer than the rest of `reset`, and is often not needed
            self._indices = self._rows[:, self.rank].tolist()
        return self._indices

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that the next batch was processed, on all workers alike; call it once for each batch, in order.

        Parameters
        ----------
        batch_idx : int
            Without effect, as in Horovod: programs count from 0 in each iteration, or from a batch of an earlier world.
        batch_size : int
            Samples of a full batch on one worker; the last batch may have fewer.

        Raises
        ------
        InvalidRequestError
            `batch_size` is no positive number.
        """
        begin, end = self._recorded, self._recorded + self._checked_size("record_batch", batch_size)
        if begin >= self.num_samples:
            text = "ElasticSampler.record_batch(%s, %s): all %d samples of this worker have been recorded already."
            log.once("sampler-too-many-batches", logging.WARNING, text, batch_idx, batch_size, self.num_samples)
        self._processed[self._rows[begin:end]] = True
        self._recorded = min(end, self.num_samples)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this worker's batch `batch_idx`, counted from 0 in each iteration; as `record_batch`.

        Raises
        ------
        InvalidRequestError
            There is no such batch, or `batch_size` is no positive number.
        """
        number, length = operator.index(batch_idx), self._checked_size("get_indices", batch_size)
        if not 0 <= number < -(-self.num_samples // length):
            fact = f"there is no batch {number} of {length} samples: this worker has {self.num_samples} samples."
            raise self._error("get_indices", fact, "count batches from 0 in every iteration over the loader.")
        return self.indices[number * length : (number + 1) * length]

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that samples of this worker (some of `indices`) were processed, each with all samples of its row.

        If there are samples of other workers among them, as in those that all workers have gathered, each counts alone.

        Raises
        ------
        InvalidRequestError
            The dataset has no such sample.
        """
        if self._row_of is None:
            self._row_of = {index: row for row, index in enumerate(self.indices)}
        found = [operator.index(each) for each in indices]
        unknown = [index for index in found if not 0 <= index < self.length]
        if unknown:
            fact = f"there is no sample {unknown[0]} in a dataset of {self.length}."
            raise self._error("record_indices", fact, "pass some of the sampler's indices.")
        if all(index in self._row_of for index in found):
            self._processed[self._rows[[self._row_of[index] for index in found]]] = True
        self._processed[found] = True

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch were processed, by all workers."""
        return int(np.count_nonzero(self._processed))

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that were processed, by all workers."""
        return set(np.flatnonzero(self._processed).tolist())

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that remained when the present world began, of all workers and in order."""
        return self._remaining.tolist()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`; small, and equal on all workers after the same steps.

        Entries: ``'epoch'``, ``'processed_num'``, ``'processed_mask'`` (bytes with a bit for each of the samples).
        """
        mask = np.packbits(self._processed).tobytes()
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_mask": mask}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, or Horovod's: ``'epoch'`` with ``'processed_num'`` or ``'processed_indices'``.

        Raises
        ------
        InvalidRequestError
            It has none of these entries, or is of another dataset.
        """
        count = self.length
        epoch = operator.index(state_dict.get("epoch", self.epoch))
        order = self._order if epoch == self.epoch else self._order_of(epoch)
        processed, fact = np.zeros(count, bool), ""
        if "processed_mask" in state_dict:
            mask = np.unpackbits(np.frombuffer(state_dict["processed_mask"], np.uint8))
            processed = mask[:count].astype(bool)
            if len(mask) != -(-count // 8) * 8 or mask[count:].any():
                fact = f"it belongs to a dataset of another length; this one has {count} samples."
        elif "processed_indices" in state_dict:
            indices = np.array(list(state_dict["processed_indices"]), np.int64)
            if ((indices < 0) | (indices >= count)).any():
                fact = f"it has samples that a dataset of {count} does not have."
            else:
                processed[indices] = True
        elif "processed_num" in state_dict:
            number = operator.index(state_dict["processed_num"])
            processed[order[: max(0, number)]] = True  # Horovod's counts the samples that fill the last row, too
            if number < 0:
                fact = f"processed_num is {number}."
        else:
            fact = f"it has none of processed_mask, processed_indices and processed_num, but {sorted(state_dict)}."
        if fact:
            raise self._error("load_state_dict", fact, "pass what state_dict() returned.")
        self.epoch, self._order, self._processed = epoch, order, processed
        self.reset()

    def _checked_size(self, operation: str, batch_size: int) -> int:
        length = operator.index(batch_size)
        if length < 1:
            raise self._error(operation, f"batch_size is {length}.", "pass the batch size of one worker.")
        return length
