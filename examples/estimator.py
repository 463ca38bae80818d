"""An Estimator: exact metrics, early stopping, checkpoints.

kvhvdrun -np 2 python examples/estimator.py
"""

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.contrib.estimator import CheckpointHandler, EarlyStoppingHandler

hvd.init()
metrics = getattr(mx, "metric", None) or gluon.metric  # of MXNet 1, or 2
draw = np.random.RandomState(0)
values = draw.normal(size=(1001, 10)).astype(np.float32)
labels = (values[:, 0] * values[:, 1] > 0).astype(np.float32)
train, held_out = (gluon.data.ArrayDataset(values[part], labels[part]) for part in (slice(800), slice(800, None)))

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(32, activation="relu", in_units=10), gluon.nn.BatchNorm(in_channels=32))
net.add(gluon.nn.Dense(2, in_units=32))
net.initialize(mx.init.Xavier())
hvd.broadcast_parameters(net.collect_params())
trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})
monitor = metrics.Accuracy()
estimator = hvd.DistributedEstimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), val_metrics=[monitor], trainer=trainer)
estimator.fit(
    gluon.data.DataLoader(train, 20, sampler=hvd.DistributedSampler(len(train), seed=1)),
    gluon.data.DataLoader(held_out, 20, sampler=hvd.DistributedSampler(len(held_out), shuffle=False, last="keep")),
    epochs=20,
    event_handlers=[EarlyStoppingHandler(monitor, patience=5, mode="max"), CheckpointHandler("checkpoints")],
)
print(f"{len(held_out)} samples, {monitor.get()[0]} {monitor.get()[1]:.4f}")
