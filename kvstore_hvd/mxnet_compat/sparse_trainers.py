"""Trainers with sparse parameters and our store: which MXNet refuses, knowing only stores of its own there."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.errors import UnsupportedMethodError, message

__all__ = ["prepare"]


def prepare(trainer: Any) -> None:
    """Let a Trainer start with our store, though it has row_sparse gradients."""
    if trainer._contains_sparse_weight:
        sparse = next(each for each in trainer._params if each._stype != "default")
        fact = f"its weights are {sparse._stype}, and the store 'horovod' keeps none."
        fix = "use dense weights (stype='default'); their gradients may be row_sparse (grad_stype)."
        raise UnsupportedMethodError(message(fact, operation="Trainer", name=sparse.name, fix=fix))
    # MXNet asks nothing else of it: what is left is what a Trainer with dense gradients does.
    trainer._contains_sparse_grad = False
