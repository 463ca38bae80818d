"""The bounds of `support.rounding`: two orders of summation keep them, and a wrong term does not."""

from __future__ import annotations

import numpy as np
import pytest

from support.rounding import apart, sgd_roundings


def summed(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    total = np.zeros(values.shape[1:], values.dtype)
    for place in order:
        total += values[place]
    return total


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("terms", [3, 30, 300])
def test_other_orders_of_summation_are_within_it(dtype: str, terms: int) -> None:
    generator = np.random.default_rng(terms)
    for _ in range(50):
        values = generator.uniform(0.5, 1, (terms, 40)).astype(dtype)
        one, other = (summed(values, generator.permutation(terms)).astype("float64") for _ in range(2))
        assert np.linalg.norm(one - other) <= apart(terms, dtype) * np.linalg.norm(one)


def test_a_term_that_is_missing_is_not() -> None:
    """The bound of the longest training in the tests is far below what a lost gradient of one sample does to it."""
    assert apart(sgd_roundings([8, 16, 16, 3], 24, 50)) < 1e-3 / 24
