"""Small networks by name, and their training on MXNet 1 and 2 alike."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from support.gluon import array, is_mxnet_2, parameters

BATCH = 4  # of each worker
MODES: dict[str, Optional[dict[str, bool]]] = {
    "plain": None,
    "hybrid": {},
    "static": {"static_alloc": True, "static_shape": True},
}


def sequential(*layers: Any) -> Any:
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def _conv() -> Any:
    return sequential(
        nn.Conv2D(6, 3, padding=1, in_channels=2),
        nn.BatchNorm(in_channels=6),
        nn.Activation("relu"),
        nn.Conv2D(4, 3, in_channels=6, use_bias=False),
        nn.Flatten(),
        nn.Dense(3, in_units=4 * 6 * 6),
    )


def _norm() -> Any:
    return sequential(
        nn.Dense(600, activation="tanh", in_units=8), nn.LayerNorm(in_channels=600), nn.Dense(3, in_units=600)
    )


def _lstm() -> Any:
    return sequential(rnn.LSTM(12, num_layers=2, input_size=5), nn.Dense(3, flatten=False, in_units=12))


def _tied() -> Any:
    first = nn.Dense(8, activation="tanh", in_units=8)
    if is_mxnet_2():
        second = nn.Dense(8, activation="tanh", in_units=8).share_parameters(first.collect_params())
    else:
        second = nn.Dense(8, activation="tanh", in_units=8, params=first.collect_params())
    return sequential(first, second, nn.Dense(3, in_units=8))


def _elementwise() -> Any:
    """Has operators that MXNet can compute in half precision on a CPU."""

    class Scale(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            make = gluon.Parameter if is_mxnet_2() else self.params.get
            self.weight, self.bias = (make(name, shape=(8,), init="normal") for name in ("weight", "bias"))

        def forward(self, x: Any, *args: Any) -> Any:
            if is_mxnet_2():
                return x * self.weight.data() + self.bias.data()
            return super().forward(x, *args)

        def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:  # noqa: N803 - MXNet's name
            return F.broadcast_add(F.broadcast_mul(x, weight), bias)

    if is_mxnet_2():
        del Scale.hybrid_forward  # MXNet 2 takes either method, not both
    return sequential(Scale(), Scale())


# How to make it, and the shape of a batch.
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "conv": (_conv, (BATCH, 2, 8, 8)),
    "norm": (_norm, (BATCH, 8)),
    "lstm": (_lstm, (6, BATCH, 5)),
    "tied": (_tied, (BATCH, 8)),
    "deferred": (lambda: sequential(nn.Dense(16, activation="tanh"), nn.Dense(3)), (BATCH, 8)),
    "dense": (lambda: sequential(nn.Dense(16, activation="tanh", in_units=8), nn.Dense(3, in_units=16)), (BATCH, 8)),
    "elementwise": (_elementwise, (BATCH, 8)),
}


def built(
    name: str,
    mode: str = "plain",
    grad_req: str = "write",
    dtype: str = "float32",
    seed: int = 3,
    contexts: Sequence[Any] = (),
) -> Any:
    make, _ = NETWORKS[name]
    net = make()
    net.cast(dtype)
    mx.random.seed(seed)
    net.initialize(mx.init.Normal(0.3), ctx=list(contexts) or mx.cpu())
    options = MODES[mode]
    if options is not None:
        net.hybridize(**options)
    for param in parameters(net):
        if param.grad_req != "null":
            param.grad_req = grad_req
    return net


def batch(shape: tuple[int, ...], seed: Any, dtype: str = "float32") -> Any:
    return array(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def trainer_of(net: Any, kvstore: Any = "create") -> Any:
    store = mx.kv.create("horovod") if kvstore == "create" else kvstore
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=store)


def backward(net: Any, data: Any) -> None:
    with autograd.record():
        (net(data) ** 2).mean().backward()


def step(net: Any, trainer: Any, name: str, seed: int, rank: int, dtype: str = "float32") -> None:
    """Train one step on a batch of this worker's own; with grad_req 'add' on the sum of two."""
    adding = any(param.grad_req == "add" for param in parameters(net))
    for part in range(2 if adding else 1):
        backward(net, batch(NETWORKS[name][1], (seed, part, rank), dtype))
    trainer.step(1)
    if adding:
        for param in parameters(net):
            if param.grad_req != "null":
                param.grad()[:] = 0  # Parameter.zero_grad() raises in MXNet 2


# -- Rounding ---------------------------------------------------------------------------------------------------------
# MXNet has other kernels for other instruction sets and numbers of threads. They sum in another order, or fuse a
# multiplication and an addition, so a bound that one machine keeps is none: it has to follow from the arithmetic.

# Of a sum of independent roundings, in standard deviations and with some room for terms that cancel.
_CHANCE = 4.0


def apart(roundings: int, dtype: str = "float32") -> float:
    """The most that two results differ, relative to the size of their terms, after so many roundings to either. Each is
    off by up to half a unit in the last place, to either side, so n of them by the square root of n such (Higham and
    Mary, SIAM J. Sci. Comput. 41, 2019), and two results by that of 2 n."""
    return _CHANCE * math.sqrt(2 * roundings) * float(np.finfo(dtype).eps) / 2


def sgd_roundings(widths: list[int], batch: int, steps: int) -> int:
    """Those on the way to a weight that plain SGD has trained, where the layers' inputs and outputs are so wide. A
    value is a sum of as many products as its layer has inputs, on the way back of as many as it has outputs, and a
    gradient of as many as there are samples; each step also rounds the update, and the weight."""
    forward, backward = sum(widths[:-1]), sum(widths[2:])
    return steps * (forward + backward + batch + 2)
