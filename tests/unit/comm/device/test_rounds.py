"""Cutting batches into rounds."""

from __future__ import annotations

import random

import pytest

from kvstore_hvd.comm.device.rounds import ALIGNMENT, buffer_bytes, rounds


@pytest.mark.parametrize("seed", range(50))
def test_every_element_is_in_one_place(seed: int) -> None:
    generator = random.Random(seed)
    item = generator.choice([1, 2, 4, 8])
    capacity, most = generator.choice([16, 100, 1000]), generator.choice([1, 2, 50])
    counts = [generator.choice([0, 1, 7, generator.randrange(2000)]) for _ in range(generator.randrange(1, 12))]
    seen = [0] * len(counts)
    for pieces in rounds(counts, item, capacity, most):
        assert 0 < len(pieces) <= most
        assert buffer_bytes(pieces, item) <= capacity
        end = 0
        for piece in pieces:
            assert piece.start == seen[piece.request]
            assert piece.length > 0
            assert piece.offset >= end
            assert piece.offset % ALIGNMENT == 0
            seen[piece.request] += piece.length
            end = piece.offset + piece.length * item
    assert seen == counts
