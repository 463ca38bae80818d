"""The same steps with any number of workers, also while they come and go.

kvhvdrun --min-np 1 --max-np 3 python examples/constant_batch.py
"""

import os

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from kvstore_hvd import elastic

GLOBAL_BATCH, EPOCHS = 60, 40

hvd.init()
mx.npx.set_np()
draw = np.random.RandomState(0)
values = draw.normal(size=(3000, 20)).astype(np.float32)
dataset = gluon.data.ArrayDataset(values, values @ draw.normal(size=20).astype(np.float32))
net = gluon.nn.Dense(1, in_units=20)
net.initialize(mx.init.Zero())
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore="horovod")
sampler = hvd.DistributedBatchSampler(len(dataset), GLOBAL_BATCH, seed=1)
loss_of = gluon.loss.L2Loss()


@elastic.run
def train(state):  # type: ignore[no-untyped-def]
    """Train the steps that are left."""
    while state.epoch < EPOCHS:
        for data, label in gluon.data.DataLoader(dataset, batch_sampler=state.sampler):
            with autograd.record():
                loss = loss_of(state.net(data), label)
            loss.backward()
            state.trainer.step(GLOBAL_BATCH)
            state.sampler.record_batch()
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        print(f"pid {os.getpid()} is rank {hvd.rank()}, epoch {state.epoch}", flush=True)


train(elastic.GluonState(net, trainer, sampler=sampler, epoch=0))
print(f"weights {' '.join(f'{each:.5f}' for each in net.weight.data().asnumpy()[0, :4])}", flush=True)
