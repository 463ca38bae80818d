"""How the workers of elastic tests train, see `support.elastic_training`. Without MXNet, for who only starts them."""

from __future__ import annotations

__all__ = ["KINDS"]

KINDS = ("Trainer", "DistributedTrainer", "DistributedOptimizer")
