"""Gluon networks for tests, alike on MXNet 1 (mx.nd) and MXNet 2 (mx.np)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.arrays import make

Array = Any  # numpy.ndarray of any dtype


def is_mxnet_2() -> bool:
    """Whether Gluon works on arrays of mx.np."""
    import mxnet as mx

    return int(mx.__version__.split(".")[0]) >= 2


def array(values: Array, ctx: Any = None) -> Any:
    """Return an array of the class that Gluon takes."""
    import mxnet as mx

    return make(mx.np if is_mxnet_2() else mx.nd, values, ctx)


def network(*layers: Any, contexts: Sequence[Any] = (), seed: int = 0, hybridize: bool = False) -> Any:
    """Return an initialised network of these layers."""
    import mxnet as mx

    net = mx.gluon.nn.HybridSequential()
    net.add(*layers)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=list(contexts) or mx.cpu())
    if hybridize:
        net.hybridize()
    return net


def mlp(inputs: int = 8, **options: Any) -> Any:
    """Return a small network with smooth activations, so that tiny differences stay tiny."""
    from mxnet.gluon import nn

    return network(
        nn.Dense(16, activation="tanh", in_units=inputs),
        nn.Dense(16, activation="tanh", in_units=16),
        nn.Dense(3, in_units=16),
        **options,
    )


def parameters(net: Any) -> list[Any]:
    """Return the parameters in a fixed order."""
    return list(net.collect_params().values())


def weights(net: Any, device: int = 0) -> list[Array]:
    """Return the values of all parameters on one device."""
    return [param.list_data()[device].asnumpy() for param in parameters(net)]


def gradients(net: Any, device: int = 0) -> list[Array]:
    """Return the gradients on one device of all parameters that have one."""
    return [param.list_grad()[device].asnumpy() for param in parameters(net) if param.grad_req != "null"]


def backward(net: Any, batches: Sequence[tuple[Any, Any]]) -> None:
    """Compute gradients of the summed squared error, one batch for each device."""
    import mxnet as mx

    loss = mx.gluon.loss.L2Loss()
    with mx.autograd.record():
        losses = [loss(net(data), label) for data, label in batches]
    for one in losses:
        one.backward()


class OwnCompression:
    """A program's own compression, which changes nothing: gradients are exchanged one by one."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


def samples(number: int, inputs: int = 8, outputs: int = 3, seed: int = 1) -> tuple[Array, Array]:
    """Return data and labels, the same ones everywhere."""
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((number, inputs)).astype("float32"),
        generator.standard_normal((number, outputs)).astype("float32"),
    )
