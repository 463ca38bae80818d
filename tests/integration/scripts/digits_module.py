"""Train on scikit-learn's digits with Horovod: the Module API of MXNet 1 and DistributedOptimizer.

    horovodrun -np 4 python digits_module.py

The batch size is that of all workers together; each of them computes on its share of every batch.
"""

import argparse
import logging

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet Module digits with Horovod")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=8, help="number of training epochs (default: 8)")
parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: 0.2)")
parser.add_argument("--seed", type=int, default=3, help="random seed of the first worker (default: 3)")
parser.add_argument("--kvstore", default=None, help="that the Module is given beside the optimizer (default: none)")
parser.add_argument("--save", default="", help="prefix of the files that every worker saves its parameters to")
args = parser.parse_args()

logging.basicConfig(level=logging.INFO)


def get_iterators(local_batch_size):
    """Return this worker's share of every training batch, and the whole test set."""
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    labels = digits.target.astype("float32")
    order = np.random.RandomState(0).permutation(len(images))
    batches = order[:1500].reshape(-1, args.batch_size)
    mine = batches[:, hvd.rank() :: hvd.size()].reshape(-1)
    test = order[1500:]
    return (
        mx.io.NDArrayIter(images[mine], labels[mine], local_batch_size, shuffle=False),
        mx.io.NDArrayIter(images[test], labels[test], len(test)),
    )


def mlp():
    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=64, name="fc1"), act_type="tanh")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(hidden, num_hidden=32, name="fc2"), act_type="tanh")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=10, name="fc3"), name="softmax")


# Initialize Horovod
hvd.init()
context = mx.cpu(hvd.local_rank())
mx.random.seed(args.seed + hvd.rank())
local_batch_size = args.batch_size // hvd.size()
train_iter, test_iter = get_iterators(local_batch_size)

model = mx.mod.Module(symbol=mlp(), context=context)
model.bind(data_shapes=train_iter.provide_data, label_shapes=train_iter.provide_label)
model.init_params(mx.init.Xavier())

# Horovod: fetch and broadcast parameters
arg_params, aux_params = model.get_params()
if arg_params:
    hvd.broadcast_parameters(arg_params, root_rank=0)
if aux_params:
    hvd.broadcast_parameters(aux_params, root_rank=0)
model.set_params(arg_params=arg_params, aux_params=aux_params)

# Horovod: wrap optimizer with DistributedOptimizer
optimizer = mx.optimizer.create("sgd", learning_rate=args.lr, momentum=0.9, rescale_grad=1.0 / local_batch_size)
optimizer = hvd.DistributedOptimizer(optimizer)

model.fit(
    train_iter,
    kvstore=args.kvstore,
    optimizer=optimizer,
    num_epoch=args.epochs,
    batch_end_callback=mx.callback.Speedometer(local_batch_size, 20) if hvd.rank() == 0 else None,
)

accuracy = dict(model.score(test_iter, "acc"))["accuracy"]
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    arg_params, _ = model.get_params()
    np.savez(f"{args.save}{hvd.rank()}.npz", *[arg_params[name].asnumpy() for name in sorted(arg_params)])
