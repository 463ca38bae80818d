"""How functions of MXNet are replaced, and which store they are replaced for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

NAME = "horovod"
# With 'dist' in the name even an MXNet without our wrappers creates the store; the store's .type stays NAME.
ALIAS = "dist_horovod"

# Of a wrapper: the function that it replaces.
_WRAPPED = "_kvstore_hvd_wraps"

# MXNet is one per process, and so is what was done to it.
_store: Optional[type] = None
_world_size: Callable[[], Optional[int]] = lambda: None  # noqa: E731
#: Where gradients live that all workers sum in place; None where there is no such memory.
arena: Callable[[], Any] = lambda: None  # noqa: E731


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `name` of a module or class by ``make(original)``, unless that has been done before."""
    original = owner.__dict__.get(name)
    if original is None or is_wrapped(original):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _WRAPPED, original)
    setattr(owner, name, wrapper)


def is_wrapped(function: Any) -> bool:
    """Whether a function is a wrapper of ours, or somebody else's around one."""
    return hasattr(function, _WRAPPED)


def register_store(mxnet: Any, store: type, world_size: Callable[[], Optional[int]], memory: Callable[[], Any]) -> None:
    """Register `store` under both names, in the place of MXNet's own, without a warning; `memory` becomes `arena`."""
    global _store, _world_size, arena
    _store, _world_size, arena = store, world_size, memory
    base = mxnet.kvstore.KVStoreBase
    present = base.kv_registry.get(NAME)
    # 2.0 has a store of this name, which needs Horovod; to replace that one is the point, and not worth a warning.
    # Replacing anybody else's is.
    if present is not None and present.__module__ in ("mxnet.kvstore.horovod", store.__module__):
        del base.kv_registry[NAME]
    base.register(store)
    base.kv_registry[NAME] = base.kv_registry[ALIAS] = store


def is_ours(kv: object) -> bool:
    """Whether it is a store of this package."""
    return _store is not None and isinstance(kv, _store)


def asks_for_ours(kv: object) -> bool:
    """Whether it is a store of this package, or the name of one."""
    return is_ours(kv) or (isinstance(kv, str) and kv.lower() in (NAME, ALIAS))


def workers() -> int:
    """How many workers there are, or are going to be."""
    return _world_size() or 1
