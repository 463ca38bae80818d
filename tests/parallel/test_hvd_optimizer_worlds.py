"""`DistributedTrainer` and `DistributedOptimizer` when the number of workers changes: means are those of who is there.
The first ranks of the job are the workers of each world; the others are alone meanwhile. What came out is compared with
a replay in this process, to the last bit: it adds the workers' gradients as the engine does."""

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from support.arrays import assert_same_bits, sum_of_ranks
from support.gluon import array, backward, batch_of, distributed, gradients, mlp, parameters, train, weights

mx = pytest.importorskip("mxnet")

RATE = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.fixture
def meet(rank, size):
    """Return what makes the first ranks a world, as many as there are, and says how many, and whether this is one."""

    def make(workers):
        workers = min(workers, size)
        hvd.shutdown()
        hvd.init(comm=list(range(workers)))
        assert hvd.size() == (workers if rank < workers else 1)
        return workers, rank < workers

    yield make
    hvd.shutdown()
    hvd.init(comm=list(range(size)))


class Training:
    def __init__(self, kind, factor=1.0):
        self.net, self.model, self._factor = mlp(seed=5), mlp(seed=5), factor
        self._alone = mx.gluon.Trainer(self.model.collect_params(), "sgd", dict(RATE), kvstore=None)
        params, how = self.net.collect_params(), {"gradient_predivide_factor": factor}
        self.trainer = distributed(kind, params, "sgd", dict(RATE), **how)

    def replay(self, workers, step):
        parts = []
        for worker in range(workers):
            backward(self.model, [batch_of(step, worker)])
            parts.append([each / np.float32(self._factor) for each in gradients(self.model)])
        for parameter, of_workers in zip(parameters(self.model), zip(*parts)):
            parameter.list_grad()[0][:] = array(sum_of_ranks(list(of_workers)))
        self._alone._scale = self._factor / workers
        self._alone.step(4)

    def steps(self, rank, workers, *steps):
        for step in steps:
            train(self.net, self.trainer, batch_of(step, rank))
            self.replay(workers, step)

    def found(self):
        return [*zip(weights(self.net), weights(self.model))]


@pytest.mark.parametrize("how", ["sync", "broadcast"])
@pytest.mark.parametrize(
    ("kind", "factor", "before", "after"), [("DistributedTrainer", 1.0, 3, 2), ("DistributedOptimizer", 2.0, 1, 4)]
)
def test_other_workers(rank, meet, kind, before, after, factor, how):
    """The sums of a world are divided by its number of workers, also where the Trainer is older than the world."""
    before, _ = meet(before)
    training = Training(kind, factor)
    state = elastic.GluonState(net=training.net, trainer=training.trainer)
    found = []  # looked at in the end: who fails earlier would leave the others waiting
    for number, asked in enumerate((before, after, before)):
        workers, takes_part = meet(asked)
        if how == "sync":
            state.sync()  # newcomers have done other steps meanwhile
        elif number:
            hvd.broadcast_parameters(training.net.collect_params())
            hvd.broadcast_trainer_states(training.trainer)
        training.steps(rank, workers, 2 * number, 2 * number + 1)
        if takes_part:
            found += training.found()
            state.save()
    for ours, models in found:
        assert_same_bits(ours, models)
