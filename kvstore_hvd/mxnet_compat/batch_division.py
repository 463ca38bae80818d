"""With our store, `Module` divides gradients by the samples of all workers, as with 'dist_sync'.

MXNet makes an optimizer of its name with ``rescale_grad = 1 / batch_size``, and counts the batches of the other workers
only where it reads 'dist' in the type of the store. A ``rescale_grad`` that the program chooses itself is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from kvstore_hvd.mxnet_compat import exchanging
from kvstore_hvd.mxnet_compat.wrapping import wrap

__all__ = ["patch"]

# Of an optimizer that MXNet has made of its name: the batch size of one worker, and how many workers there were.
_DIVISION = "_kvstore_hvd_division"

_is_ours: exchanging.IsOurs = lambda kv: False  # noqa: E731


def patch(mxnet: Any, is_ours: exchanging.IsOurs) -> None:
    """Make the changes to MXNet; 2.0 has no Module."""
    global _is_ours
    _is_ours = is_ours
    if hasattr(mxnet, "mod"):
        wrap(mxnet.mod.Module, "init_optimizer", _optimizing)
        wrap(mxnet.mod.Module, "update", _updating)


def _divide(optimizer: Any, batch_size: int, workers: int) -> None:
    vars(optimizer)[_DIVISION] = batch_size, workers
    optimizer.rescale_grad = 1.0 / (batch_size * workers)


def _optimizing(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_optimizer(
        self: Any,
        kvstore: Any = "local",
        optimizer: Any = "sgd",
        optimizer_params: Any = (("learning_rate", 0.01),),
        force_init: bool = False,
    ) -> None:
        before = self._optimizer
        if isinstance(optimizer, str):
            original(self, kvstore, optimizer, optimizer_params, force_init)
            is_new = self._optimizer is not before  # an optimizer that is there already stays
            if is_new and _is_ours(self._kvstore) and "rescale_grad" not in dict(optimizer_params):
                _divide(self._optimizer, self._exec_group.batch_size, self._kvstore.num_workers)
            return
        if not _is_ours(kvstore) or exchanging.optimizer_in(optimizer) is not None:
            original(self, kvstore, optimizer, optimizer_params, force_init)
            return
        with warnings.catch_warnings():  # MXNet's would name the batch size of one worker
            warnings.filterwarnings("ignore", "Optimizer created manually outside Module", UserWarning)
            original(self, kvstore, optimizer, optimizer_params, force_init)
        expected = 1.0 / (self._exec_group.batch_size * self._kvstore.num_workers)
        if self._optimizer is not before and optimizer.rescale_grad != expected:
            warnings.warn(
                f"the optimizer of this Module was made with rescale_grad={optimizer.rescale_grad}; "
                f"1/batch_size/num_workers is {expected}. Is this intended?",
                stacklevel=2,
            )

    return init_optimizer


def _updating(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any) -> None:
        division = vars(self._optimizer).get(_DIVISION)
        if division is not None and _is_ours(self._kvstore):
            batch_size, before = division
            workers = self._kvstore.num_workers
            if workers != before and self._optimizer.rescale_grad == 1.0 / (batch_size * before):
                _divide(self._optimizer, batch_size, workers)
        original(self)

    return update
