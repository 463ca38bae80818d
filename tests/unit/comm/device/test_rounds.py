"""Cutting batches into rounds."""

from __future__ import annotations

import random

import pytest

from kvstore_hvd.comm.device.rounds import ALIGNMENT, Piece, buffer_bytes, rounds


def test_tensors_that_fit_share_a_round() -> None:
    assert rounds([3, 5, 1], 4, 1024, 10) == [[Piece(0, 0, 3, 0), Piece(1, 0, 5, 16), Piece(2, 0, 1, 48)]]


def test_one_that_fits_whole_is_not_cut() -> None:
    assert rounds([3, 8], 4, 32, 10) == [[Piece(0, 0, 3, 0)], [Piece(1, 0, 8, 0)]]


def test_one_that_is_too_large_is_cut_and_shares_its_last_round() -> None:
    assert rounds([20, 2], 4, 32, 10) == [
        [Piece(0, 0, 8, 0)],
        [Piece(0, 8, 8, 0)],
        [Piece(0, 16, 4, 0), Piece(1, 0, 2, 16)],
    ]


def test_one_that_is_too_large_begins_where_there_is_room() -> None:
    assert rounds([2, 12], 4, 32, 10) == [[Piece(0, 0, 2, 0), Piece(1, 0, 4, 16)], [Piece(1, 4, 8, 0)]]


def test_empty_tensors_are_in_no_round() -> None:
    assert rounds([0, 0], 4, 64, 10) == []
    assert rounds([0, 1, 0], 4, 64, 10) == [[Piece(1, 0, 1, 0)]]


def test_a_round_has_so_many_pieces() -> None:
    assert [len(pieces) for pieces in rounds([1] * 7, 4, 4096, 3)] == [3, 3, 1]


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
