"""A store with one worker, and small trainings with it: for tests of what is changed in MXNet, be it 1 or 2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore_hvd import mxnet_compat
from support import gluon
from support.gluon import is_mxnet_2

mx = mxnet_compat.require_mxnet()

V2 = is_mxnet_2()
_Base: Any = mx.kvstore.KVStoreBase


class Fake(_Base):
    """One worker, which has all that others would have, and takes the gradients of a step one by one."""

    made: list[Fake] = []  # noqa: RUF012 - emptied by the fixture
    type, rank, num_workers = "horovod", 0, 1
    labels: dict[int, str] | None = None
    _member = SimpleNamespace(topology=None, adapter_for_gradients=lambda: None)

    def __init__(self) -> None:
        Fake.made.append(self)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False

    def _set_key_labels(self, labels: dict[int, str]) -> None:
        self.labels = labels

    def _set_staged_reasons(self, reasons: dict[int, str]) -> None:
        """There are no reports."""

    def _make_step(self, gradients: Any) -> None:
        """There is no call for all of them."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        for array in out if isinstance(out, list) else [out]:
            value.copyto(array) if array is not value else None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """The sum of one is there already."""


class World:
    size: int | None = None


def store_class() -> type:
    Fake.__name__ = "Horovod"  # MXNet registers by the name of the class
    return Fake


def network(devices: int = 1) -> Any:
    layers = mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.Dense(1, in_units=3)
    return gluon.network(*layers, contexts=[mx.cpu(i) for i in range(devices)])


def step(net: Any, trainer: Any, by: str = "step") -> None:
    data, label = gluon.samples(4, 2, 1)
    devices = gluon.parameters(net)[0].list_ctx()
    gluon.backward(net, [(gluon.array(data, where), gluon.array(label, where)) for where in devices])
    getattr(trainer, by)(4)


def trainer_of(net: Any, kvstore: Any, **options: Any) -> Any:
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **options)
