"""A recurrent network over long sequences: hidden state from batch to batch, clipped gradients.

kvhvdrun -np 2 python examples/rnn.py
"""

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

SEQUENCES, LENGTH, PART, EPOCHS = 12, 200, 20, 15  # of all workers; steps; steps between two updates

hvd.init()
mx.npx.set_np()
mx.random.seed(1)
steps = np.arange(LENGTH + 1)[:, None] + np.random.RandomState(0).uniform(0, 6, SEQUENCES)
waves = np.sin(steps)[:, hvd.rank() :: hvd.size(), None].astype(np.float32)  # this worker's sequences
net = gluon.rnn.LSTM(16, input_size=1)
head = gluon.nn.Dense(1, flatten=False, in_units=16)
for block in (net, head):
    block.initialize(mx.init.Uniform(0.3))
parameters = [each for block in (net, head) for each in block.collect_params().values()]
trainer = hvd.DistributedTrainer(parameters, "adam", {"learning_rate": 0.02})
loss_of = gluon.loss.L2Loss()
for _ in range(EPOCHS):
    hidden, losses = net.begin_state(batch_size=waves.shape[1]), []
    for begin in range(0, LENGTH, PART):
        part = mx.np.array(waves[begin : begin + PART + 1])
        hidden = [each.detach() for each in hidden]
        with autograd.record():
            output, hidden = net(part[:-1], hidden)
            loss = loss_of(head(output), part[1:]).mean()
        loss.backward()
        trainer.allreduce_grads()
        hvd.clip_global_norm(trainer, 0.5)
        trainer.update(1)
        losses.append(float(loss))
mean = hvd.allreduce(mx.np.array([np.mean(losses)]), name="loss")
print(f"epoch {EPOCHS}: loss {float(mean[0]):.4f}")
