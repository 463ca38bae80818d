"""A store with one worker, and small trainings with it: for tests of what is changed in MXNet, be it 1 or 2."""

from __future__ import annotations

from typing import Any

from kvstore_hvd import mxnet_compat

mx = mxnet_compat.require_mxnet()

V2 = mx.__version__.startswith("2")
_Base: Any = mx.kvstore.KVStoreBase


class Fake(_Base):
    """One worker, which has all that others would have."""

    made: list[Fake] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self) -> None:
        self.labels: dict[int, str] | None = None
        Fake.made.append(self)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """No."""
        return False

    @property
    def type(self) -> str:
        """As the real one."""
        return "horovod"

    @property
    def rank(self) -> int:
        """The only one."""
        return 0

    @property
    def num_workers(self) -> int:
        """One."""
        return 1

    def _set_key_labels(self, labels: dict[int, str]) -> None:
        self.labels = labels

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write what is there."""
        for array in out if isinstance(out, list) else [out]:
            value.copyto(array) if array is not value else None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """The sum of one is there already."""


class World:
    """What the hooks are told about the number of workers."""

    size: int | None = None


def store_class() -> type:
    """Return the class that the hooks register."""
    Fake.__name__ = "Horovod"  # MXNet registers by the name of the class
    return Fake


def array(*shape: int) -> Any:
    """Return ones, of the class that Gluon takes."""
    return mx.np.ones(shape) if V2 else mx.nd.ones(shape)


def network(devices: int = 1) -> Any:
    """Return a network of four parameters on some CPU devices."""
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.Dense(1, in_units=3))
    where = [mx.cpu(i) for i in range(devices)]
    net.initialize(**{"device" if V2 else "ctx": where})
    return net


def parameters(net: Any) -> list[list[float]]:
    """Return the parameters on the first device."""
    return [parameter.list_data()[0].asnumpy().ravel().tolist() for parameter in net.collect_params().values()]


def backward(net: Any) -> None:
    """Compute gradients on every device."""
    first = next(iter(net.collect_params().values()))
    for data in first.list_data():
        context = data.device if V2 else data.context
        with mx.autograd.record():
            loss = net(array(4, 2).astype(data.dtype).as_in_context(context)).sum()
        loss.backward()


def step(net: Any, trainer: Any, by: str = "step") -> None:
    """Train one step, by ``step`` or ``update``."""
    backward(net)
    getattr(trainer, by)(4)


def trainer_of(net: Any, kvstore: Any, **options: Any) -> Any:
    """Return a Trainer."""
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **options)
