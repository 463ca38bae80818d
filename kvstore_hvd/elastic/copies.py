"""Copies of Python objects that share nothing with them, arrays of MXNet included."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.store.arrays import buffer_like
from kvstore_hvd.store.arrays import copy as copy_array


def is_sampler(value: Any) -> bool:
    """Whether it is an `ElasticSampler`. Does not import MXNet."""
    module = sys.modules.get("kvstore_hvd.elastic.sampler")
    return module is not None and isinstance(value, module.ElasticSampler)


def deep_copy(value: Any) -> Any:
    """A copy as ``copy.deepcopy`` makes it, in which arrays of MXNet stay on their devices."""
    # MXNet's arrays are copied by pickling them: slowly, to cpu(0), and not those that are empty.
    copies: dict[int, Any] = {}
    for array in _arrays_in(value):
        copied = copies[id(array)] = buffer_like(array, context=mxnet_compat.context_of(array))
        copy_array(array, copied)
    for copied in copies.values():
        copied.wait_to_read()
    return copy.deepcopy(value, copies)


def named_copies(values: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Copies of values. One copy for all, so that what two of them share they still share."""
    try:
        return deep_copy(dict(values))  # type: ignore[no-any-return]
    except Exception:
        for name, value in values.items():
            _check_copy(of, name, value)
        raise


def _check_copy(of: str, name: str, value: Any) -> None:
    try:
        deep_copy(value)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        fact = f"a value of {type(value).__name__} cannot be copied: {error}."
        text = message(fact, operation=of, name=name, fix="keep it outside of the state.")
        raise InvalidRequestError(text) from error


def _arrays_in(value: Any) -> list[Any]:
    """The arrays of MXNet in a tree of containers and objects, each once."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (str, bytes, int, float, complex, type(None))) or id(one) in seen:
            continue
        seen.add(id(one))
        if mxnet_compat.is_ndarray(one):
            found.append(one)
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif is_sampler(one):
            fact = "an ElasticSampler among the values would give every worker rank 0's share of the samples."
            fix = "pass it to GluonState(sampler=...) under a name of its own, or keep it outside of the state."
            raise InvalidRequestError(message(fact, operation="state", fix=fix))
        elif not isinstance(one, type) and not hasattr(one, "__deepcopy__"):
            waiting.append(getattr(one, "__dict__", None))
    return found
