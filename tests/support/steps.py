"""Trainers whose gradients are what a test says, for tests of what a step exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_hvd.mxnet_compat import dtype_name
from support.arrays import assert_same_bits, contribution, expected_sum
from support.gluon import array

# Small ones that are neighbours share an operation of MXNet; the large ones between them do not.
SHAPES = ((3, 4), (5,), (1,), (128, 64), (7,), (2, 2), (300, 70), (9,))


def make_parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, prefix: str = "p") -> dict[str, Any]:
    """Return initialised parameters of these shapes, by name."""
    import mxnet as mx

    params = {}
    for number, shape in enumerate(shapes):
        name = f"{prefix}{number:02}"
        params[name] = mx.gluon.Parameter(name, shape=shape)
        params[name].initialize()
    return params


def make_trainer(params: Any, store: Any = None) -> Any:
    """Return a Trainer of these parameters that has started its store."""
    import mxnet as mx

    trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1}, kvstore=store or mx.kv.create("horovod"))
    trainer._init_kvstore()
    trainer._init_params()
    return trainer


def fill(trainer: Any, rank: int, seed: object) -> None:
    """Give every gradient the rank's contribution."""
    for number, param in enumerate(trainer._params):
        if param.grad_req != "null":
            (gradient,) = param.list_grad()
            gradient[:] = array(contribution(rank, gradient.shape, dtype_name(gradient), (seed, number)))


def assert_summed(trainer: Any, size: int, seed: object) -> None:
    """Fail unless every gradient is the sum of all ranks' contributions, bit by bit."""
    for number, param in enumerate(trainer._params):
        if param.grad_req != "null":
            (gradient,) = param.list_grad()
            expected = expected_sum(size, gradient.shape, dtype_name(gradient), (seed, number))
            assert_same_bits(gradient.asnumpy(), expected)


def check_step(trainer: Any, rank: int, size: int, seed: object) -> None:
    """Exchange contributions, and fail unless the sums are right."""
    fill(trainer, rank, seed)
    trainer.allreduce_grads()
    assert_summed(trainer, size, seed)
