"""Two networks with a Trainer each.

kvhvdrun -np 2 python examples/gan.py
"""

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH, STEPS = 64, 300

hvd.init()
mx.npx.set_np()
mx.random.seed(1)
generator, critic = gluon.nn.HybridSequential(), gluon.nn.HybridSequential()
generator.add(gluon.nn.Dense(16, activation="relu", in_units=4), gluon.nn.Dense(1, in_units=16))
critic.add(gluon.nn.Dense(16, activation="relu", in_units=1), gluon.nn.Dense(1, in_units=16))
trainers = []
for net in (generator, critic):  # Trainers are made in the same order on all workers
    net.initialize(mx.init.Xavier())
    trainers.append(hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.005}))
loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()
real, fake = mx.np.ones((BATCH, 1)), mx.np.zeros((BATCH, 1))
draw = np.random.RandomState(hvd.rank())  # each worker has data of its own
for _ in range(STEPS):
    samples = mx.np.array(draw.normal(3, 0.5, size=(BATCH, 1)).astype(np.float32))
    noise = mx.np.array(draw.normal(size=(BATCH, 4)).astype(np.float32))
    with autograd.record():
        made = generator(noise)
        loss = loss_of(critic(samples), real) + loss_of(critic(made.detach()), fake)
    loss.backward()
    trainers[1].step(BATCH)
    with autograd.record():
        loss = loss_of(critic(generator(noise)), real)
    loss.backward()
    trainers[0].step(BATCH)
print(f"mean of what it makes: {float(generator(noise).mean()):.1f}")
