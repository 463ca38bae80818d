"""An Estimator that goes on with the same steps when workers are lost or come.

kvhvdrun --min-np 1 --max-np 3 python examples/estimator_elastic.py
"""

import os

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.contrib.estimator import EpochEnd

from kvstore_hvd import elastic

GLOBAL_BATCH, EPOCHS = 60, 40

hvd.init()
draw = np.random.RandomState(0)
values = draw.normal(size=(3000, 10)).astype(np.float32)
dataset = gluon.data.ArrayDataset(values, (values[:, 0] > values[:, 1]).astype(np.float32))
net = gluon.nn.Dense(2, in_units=10)
net.initialize(mx.init.Zero())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore="horovod")
sampler = hvd.DistributedBatchSampler(len(dataset), GLOBAL_BATCH, seed=1)


class Progress(EpochEnd):
    """Prints a line after each epoch."""

    def epoch_end(self, estimator, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Print where the training is."""
        print(f"pid {os.getpid()} is rank {hvd.rank()}, epoch {state.epoch}", flush=True)


@elastic.run
def train(state):  # type: ignore[no-untyped-def]
    """Train the epochs that are left."""
    estimator = hvd.DistributedEstimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer=trainer)
    loader = gluon.data.DataLoader(dataset, batch_sampler=state.sampler)
    estimator.fit(loader, epochs=EPOCHS - state.epoch, event_handlers=[hvd.CommitHandler(state), Progress()])


state = elastic.GluonState(net, trainer, sampler=sampler, epoch=0)
train(state)
print(f"weights {' '.join(f'{each:.5f}' for each in net.weight.data().asnumpy()[0, :4])}", flush=True)
