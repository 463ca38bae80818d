"""Large batches in parts: gradients of several passes, exchanged and applied once.

kvhvdrun -np 2 python examples/accumulation.py
"""

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

PARTS, PART = 4, 10

hvd.init()
mx.npx.set_np()
draw = np.random.RandomState(0)
values = draw.normal(size=(2400, 8)).astype(np.float32)
dataset = gluon.data.ArrayDataset(values, values.sum(axis=1))
sampler = hvd.DistributedBatchSampler(len(dataset), PART * hvd.size(), seed=1)
net = gluon.nn.Dense(1, in_units=8)
net.initialize(mx.init.Zero())
for parameter in net.collect_params().values():
    parameter.grad_req = "add"
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_of = gluon.loss.L2Loss()
for number, (data, label) in enumerate(gluon.data.DataLoader(dataset, batch_sampler=sampler), 1):
    with autograd.record():
        loss = loss_of(net(data), label)
    loss.backward()
    if number % PARTS == 0:
        trainer.step(PARTS * PART)
        for parameter in net.collect_params().values():
            parameter.grad()[:] = 0
print(f"weights {' '.join(f'{each:.4f}' for each in net.weight.data().asnumpy()[0, :4])}")
