"""A Module: exact metrics, checkpoints of rank 0, samples of all workers. MXNet 1 only.

kvhvdrun -np 2 python examples/module.py
"""

import logging

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np

BATCH, EPOCHS = 20, 8

hvd.init()
logging.basicConfig(level=logging.INFO if hvd.rank() == 0 else logging.WARNING)
mx.random.seed(1)
draw = np.random.RandomState(0)
values = draw.normal(size=(800, 10)).astype(np.float32)
labels = (values[:, 0] * values[:, 1] > 0).astype(np.float32)
own = slice(hvd.rank(), None, hvd.size())
iterator = mx.io.NDArrayIter(values[own], labels[own], BATCH, last_batch_handle="discard")

hidden = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=32), act_type="relu")
network = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=2), name="softmax")
module = mx.mod.Module(network)
module.fit(
    iterator,
    eval_metric=hvd.DistributedMetric("acc"),
    kvstore="horovod",
    optimizer="adam",
    optimizer_params={"learning_rate": 0.01},
    initializer=mx.init.Xavier(),
    batch_end_callback=mx.callback.Speedometer(BATCH * hvd.size(), frequent=10),
    epoch_end_callback=mx.callback.do_checkpoint("module", period=EPOCHS) if hvd.rank() == 0 else None,
    begin_epoch=0,
    num_epoch=EPOCHS,
)
print(module.score(iterator, hvd.DistributedMetric("acc")))
