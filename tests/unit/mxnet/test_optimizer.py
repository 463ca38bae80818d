"""By what a `DistributedTrainer` scales sums, where the number of workers changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore_hvd.mxnet.optimizer import Scale, TrainerMethods


def test_a_copied_scale_is_as_exact_as_the_original_in_every_world() -> None:
    """As AMP copies it: among 49 workers, and read where there is one again."""
    trainer = TrainerMethods.__new__(TrainerMethods)
    topology = SimpleNamespace(size=49, is_outside=False)
    vars(trainer).update(_world=SimpleNamespace(topology=topology), _process_set=None)
    vars(trainer)["_scale"] = Scale(1.0, 1)
    assert trainer._scale == 1 / 49
    trainer._amp_original_scale = trainer._scale
    topology.size = 1
    assert trainer._amp_original_scale == trainer._scale == 1.0
    trainer._scale = 0.5
    assert (trainer._scale, trainer._amp_original_scale) == (0.5, 1.0)
    topology.size = 2
    assert (trainer._scale, trainer._amp_original_scale) == (0.25, 0.5)


def test_a_scale_that_was_not_copied_is_none() -> None:
    trainer = TrainerMethods.__new__(TrainerMethods)
    with pytest.raises(AttributeError, match="has no attribute '_amp_original_scale'"):
        trainer._amp_original_scale  # noqa: B018
