"""Mistakes that type checkers must find: one in each line with the word ERROR. Never run."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic

ones = np.ones(3, np.float32)


@elastic.run
def train(state: elastic.GluonState, epochs: int) -> list[float]:
    """Train."""
    return [0.0] * epochs


def mistakes(net: Any, state: elastic.GluonState) -> None:
    """Each is one of its own."""
    kvstore_hvd.allreduce(ones, "a", op="mean")  # ERROR: there is no such op
    kvstore_hvd.allreduce(ones)  # ERROR: the name is missing
    kvstore_hvd.all_reduce(ones, "a")  # ERROR: there is no such function
    text: str = kvstore_hvd.allreduce(ones, "a")  # ERROR: an array
    hvd.allreduce(mx.nd.ones(1), op="sum")  # ERROR: hvd.Sum
    hvd.broadcast(mx.nd.ones(1))  # ERROR: from whom
    hvd.local_ranks()  # ERROR: there is no such function
    hvd.DistributedTrainer(net, "sgd", process_sets=None)  # ERROR: process_set
    elastic.ElasticSampler([1], shufle=True)  # ERROR: shuffle
    train(state)  # ERROR: epochs is missing
    train(state, "3")  # ERROR: an int
    number: int = train(state, 3)  # ERROR: a list
    elastic.run_state(train)  # ERROR: there is no such function
    print(text, number)
