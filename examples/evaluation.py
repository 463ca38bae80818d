"""An evaluation that counts each sample once, on workers with shares of other sizes.

kvhvdrun -np 3 python examples/evaluation.py
"""

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon

hvd.init()
metrics = getattr(mx, "metric", None) or gluon.metric  # of MXNet 1, or 2
draw = np.random.RandomState(0)
values = draw.normal(size=(1001, 10)).astype(np.float32)
dataset = gluon.data.ArrayDataset(values, (values[:, 0] > 0).astype(np.float32))
net = gluon.nn.HybridSequential()
net.add(gluon.nn.BatchNorm(in_channels=10), gluon.nn.Dense(2, in_units=10))
net.initialize(mx.init.Xavier())
hvd.broadcast_parameters(net.collect_params())

hvd.average_running_statistics(net)  # of BatchNorm, which each worker keeps of its own data
accuracy, loss = hvd.DistributedMetric("acc"), hvd.DistributedMetric(metrics.Loss())
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
loader = gluon.data.DataLoader(dataset, 32, sampler=hvd.DistributedSampler(len(dataset), shuffle=False, last="keep"))
for data, label in loader:
    predicted = net(data)
    accuracy.update([label], [predicted])
    loss.update(None, [loss_of(predicted, label)])
if hvd.rank() == 0:
    net.save_parameters("evaluated.params")
print(f"accuracy {accuracy.get()[1]:.4f}, loss {loss.get()[1]:.4f}")
