"""Train a small convolutional network on handwritten digits: kvhvdrun -np 2 python examples/digits.py

All workers draw the same batches, and each computes on its share. The loss is a sum over samples and `Trainer.step`
gets the size of the whole batch, so a step does not depend on the number of workers, except for the rounding of sums.
"""

import hashlib
import math
import time

import kvstore_hvd  # registers the store; before MXNet, which runs with today's NumPy then

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE, COPIES, TESTS = 6, 60, 0.05, 12, 360

mx.npx.set_np()
kv = mx.kv.create("horovod")
digits, random = load_digits(), np.random.default_rng(1)
order = random.permutation(len(digits.images))
images = np.pad(digits.images[order, None] / 16, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.float32)
labels = digits.target[order].astype(np.float32)


def cut(which, shift=((1,), (1,))):
    """Images of 8 x 8 pixels, each with its own shift of -1, 0 or 1 pixels (here 0, 1 or 2) down and to the right."""
    rows, columns = (np.reshape(part, (-1, 1)) + np.arange(8) for part in shift)
    return mx.np.array(images[which[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None])


mx.random.seed(1)  # equal weights everywhere; the store would take those of rank 0 anyway
net = nn.HybridSequential()
net.add(nn.Conv2D(32, 3, padding=1, activation="relu"), nn.Conv2D(64, 3, padding=1, activation="relu"))
net.add(nn.MaxPool2D(), nn.Dense(128, activation="relu"), nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": 0.9}, kvstore=kv)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

per_epoch = (len(images) - TESTS) * COPIES // BATCH
steps, training_s, measured_s, waiting_s, measured = EPOCHS * per_epoch, 0.0, 0.0, 0.0, 0
for step in range(steps):
    start = time.perf_counter()
    trainer.set_learning_rate(RATE * (1 + math.cos(math.pi * step / steps)) / 2)
    share = slice(kv.rank * BATCH // kv.num_workers, (kv.rank + 1) * BATCH // kv.num_workers)
    mine, shift = random.integers(TESTS, len(images), BATCH)[share], random.integers(0, 3, (2, BATCH))[:, share]
    with autograd.record():
        loss = loss_of(net(cut(mine, shift)), mx.np.array(labels[mine])).sum()
    loss.backward()
    if step % 5 < 4:
        trainer.step(BATCH)
    else:  # every fifth step is taken apart: from own gradients to the sums of all workers
        mx.nd.waitall()
        computed = time.perf_counter()
        trainer.allreduce_grads()
        mx.nd.waitall()
        waiting_s += time.perf_counter() - computed
        trainer.update(BATCH)
        mx.nd.waitall()
        measured_s += time.perf_counter() - start
        measured += 1
    mx.nd.waitall()
    training_s += time.perf_counter() - start
    if step % per_epoch == per_epoch - 1:
        answers = net(cut(np.arange(kv.rank, TESTS, kv.num_workers))).asnumpy().argmax(axis=1)
        right = np.array([(answers == labels[kv.rank : TESTS : kv.num_workers]).sum()])
        accuracy = 100 * kvstore_hvd.allreduce(right, name="right")[0] / TESTS
        if kv.rank == 0:
            print(f"epoch {step // per_epoch + 1}/{EPOCHS}  test accuracy {accuracy:.2f} %", flush=True)

bits = b"".join(parameter.data().asnumpy().tobytes() for parameter in net.collect_params().values())
digest = np.frombuffer(hashlib.sha256(bits).digest(), np.uint8)
equal = (kvstore_hvd.allreduce(digest, name="digest", op="max") == digest).all()
if not equal:
    raise SystemExit("the workers have different parameters")
if kv.rank == 0:
    print(f"test accuracy  {accuracy:.2f} %")
    print(f"speed          {steps * BATCH / training_s:.0f} images/s, all workers together")
    print(f"waiting        {100 * waiting_s / measured_s:.1f} % of a step, in {measured} steps without overlap")
    print(f"parameters     sha256 {hashlib.sha256(bits).hexdigest()[:16]}, equal on all {kv.num_workers} workers")
