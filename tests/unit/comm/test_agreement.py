"""Texts that workers tell each other: what is too long, and what is no UTF-8."""

from __future__ import annotations

import pytest

from kvstore_hvd.comm.agreement import exchange
from kvstore_hvd.process import process
from support.fake_native import fake_world


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("/tmp/ü", "/tmp/ü"),
        ("/tmp/\udcff", "/tmp/\udcff"),  # a file name that is no UTF-8, as Python shows it
        ("x" * 16384, "x" * 16384),
        ("x" * 16385, "x" * 16384),
    ],
    ids=["nothing", "text", "bytes", "longest", "too long"],
)
def test_each_worker_has_its_place(rank: int, text: str, told: str) -> None:
    with fake_world(rank=rank, size=3) as communicator:
        others = ["", "", ""]
        others[rank] = told
        assert exchange(communicator, process.current().topology, "test", text) == others
        (request,) = communicator.requests
        assert (request.name, request.shape, request.dtype) == ("test", (3, 16384), "uint8")
