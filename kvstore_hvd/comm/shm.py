"""The world of one host: workers that share memory."""

from __future__ import annotations

import os
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.config import config
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.rendezvous import share_segment
from kvstore_hvd.topology import World

__all__ = ["ShmCommunicator"]


class ShmCommunicator(Communicator):
    """Joins the shared memory of the world's workers; returns once this worker has it.

    Parameters
    ----------
    world : World
        Who the workers are, and the secret that they share.

    Raises
    ------
    LaunchError
        Workers did not appear in time, or run another build of this package.
    """

    def __init__(self, world: World) -> None:
        topology = world.topology
        created: list[native.Segment] = []

        def create() -> int:
            created.append(native.Segment.create(topology.size))
            return created[0].fd

        fd = share_segment(world, create, version=native.abi())
        if created:
            self._segment = created[0]
        else:
            try:
                self._segment = native.Segment.attach(fd)
            finally:
                os.close(fd)
        self._engine = native.Engine(
            self._segment,
            topology.rank,
            config().timeout_s,
            True,
            topology.host,
        )

    def submit(self, request: Request) -> native.Work:
        """See `Communicator.submit`."""
        return self._engine.submit(_native_request(request))

    def run(self, request: Request) -> None:
        """See `Communicator.run`."""
        self._engine.run(_native_request(request))

    def wait(self, work: native.Work) -> None:
        """See `Communicator.wait`."""
        self._engine.wait(work)

    def health(self) -> KVHvdError | None:
        """See `Communicator.health`."""
        return self._engine.health()

    def abort(self, text: str) -> None:
        """See `Communicator.abort`."""
        self._engine.abort(text)

    def shutdown(self, reason: str = "") -> None:
        """See `Communicator.shutdown`."""
        self._engine.shutdown(reason)

    def mxnet_adapter(self, library_path: str, naive: bool) -> native.MXNetAdapter:
        """See `Communicator.mxnet_adapter`."""
        return native.MXNetAdapter(self._engine, library_path, naive)


def _native_request(request: Request) -> Any:
    return native.request(
        request.collective,
        request.name,
        request.label,
        request.inputs,
        request.outputs,
        request.shape,
        request.dtype,
        request.op,
        request.prescale,
        request.postscale,
        request.root,
        request.priority,
    )
