"""Gluon networks for tests, alike on MXNet 1 (mx.nd) and MXNet 2 (mx.np)."""

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from support.arrays import assert_equal_on_all_ranks, make

Array = Any  # numpy.ndarray of any dtype


def is_mxnet_2() -> bool:
    """Whether Gluon works on arrays of mx.np."""
    import mxnet as mx

    return int(mx.__version__.split(".")[0]) >= 2


def array(values: Array, ctx: Any = None) -> Any:
    import mxnet as mx

    return make(mx.np if is_mxnet_2() else mx.nd, values, ctx)


def network(*layers: Any, contexts: Sequence[Any] = (), seed: int = 0, hybridize: bool = False) -> Any:
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
    return list(net.collect_params().values())


def names_of(net: Any) -> list[str]:
    """Return what messages and reports call the parameters."""
    return list(net.collect_params()) if is_mxnet_2() else [param.name for param in parameters(net)]


def weights(net: Any, device: int = 0) -> list[Array]:
    return [param.list_data()[device].asnumpy() for param in parameters(net)]


def gradients(net: Any, device: int = 0) -> list[Array]:
    return [param.list_grad()[device].asnumpy() for param in parameters(net) if param.grad_req != "null"]


def bits_of(net: Any) -> dict[str, list[bytes]]:
    named = net._collect_params_with_prefix().items()
    return {name: [each.asnumpy().tobytes() for each in param.list_data()] for name, param in named}


def states_of(trainer: Any) -> dict[str, Any]:
    """Return what the next update of a Trainer depends on beside parameters and gradients, bit by bit."""

    def leaves(state: Any) -> list[Any]:
        if isinstance(state, (tuple, list)):
            return [leaf for each in state for leaf in leaves(each)]
        return [state.asnumpy().tobytes() if hasattr(state, "asnumpy") else state]

    optimizer = trainer._optimizer
    return {
        "states": [{index: leaves(state) for index, state in each.states.items()} for each in trainer._updaters],
        "counts": dict(optimizer._index_update_count),
        "rate": (optimizer.num_update, optimizer.learning_rate, trainer._scale),
    }


def backward(net: Any, batches: Sequence[tuple[Any, Any]]) -> None:
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


def samples(number: int, inputs: int = 8, outputs: int = 3, seed: Any = 1) -> tuple[Array, Array]:
    """Return data and labels, the same ones everywhere."""
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((number, inputs)).astype("float32"),
        generator.standard_normal((number, outputs)).astype("float32"),
    )


def batch_of(*seed: int, count: int = 4, ctx: Any = None) -> Any:
    return tuple(array(each, ctx) for each in samples(count, seed=seed))


def distributed(kind: str, params: Any, name: str, options: Any, kvstore: Any = None, **how: Any) -> Any:
    """Return a Trainer of this class, or a stock one with a DistributedOptimizer and this store."""
    import mxnet as mx

    import kvstore_hvd.mxnet as hvd

    if kind != "DistributedOptimizer":
        return getattr(hvd, kind)(params, name, options, **how)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create(name, **options), **how)
    return mx.gluon.Trainer(params, optimizer, kvstore=kvstore)


def train(net: Any, trainer: Any, *batches: Any, size: int = 4) -> None:
    for batch in batches:
        backward(net, [batch])
        trainer.step(size)


def trained_alone(steps: Iterable[Sequence[Any]], **options: Any) -> list[Array]:
    """Return the parameters of ``mlp(seed=5)`` after SGD in one process on the batches of all workers in each step."""
    import mxnet as mx

    net = mlp(seed=5)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=None)
    for batches in steps:
        data, label = (np.concatenate([each[i].asnumpy() for each in batches]) for i in (0, 1))
        train(net, trainer, (array(data), array(label)), size=len(data))
    return weights(net)


def assert_trained(net: Any, expected: Sequence[Array], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Fail unless the parameters are these on all devices of all workers, but for rounding, and alike on all."""
    for values, theirs in zip(parameters(net), expected):
        for ours in values.list_data():
            np.testing.assert_allclose(ours.asnumpy(), theirs, rtol=rtol, atol=atol)
    assert_alike(net)


def assert_alike(*values: Any) -> None:
    """Fail unless arrays, and the parameters of networks on all devices, have the bits of rank 0's. Collective."""
    arrays = []
    for value in values:
        params = parameters(value) if hasattr(value, "collect_params") else []
        arrays += [each.asnumpy() for param in params for each in param.list_data()] or [value]
    bits = b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)
    assert_equal_on_all_ranks(np.frombuffer(bits, np.uint8), os.environ["PYTEST_CURRENT_TEST"])


def scaler_of(trainer: Any) -> Any:
    """Give a Trainer the loss scaler of AMP, as `amp.init_trainer` does; returns AMP and the scaler."""
    amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
    scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
    return amp, scaler
