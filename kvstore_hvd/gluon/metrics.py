"""Metrics over the samples of all workers."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import pickle
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from kvstore_hvd.errors import InvalidRequestError, MismatchError, message
from kvstore_hvd.world import process

_library = getattr(mx, "metric", None) or mx.gluon.metric  # of MXNet 1, or 2

_SUMS = {"sum_metric", "num_inst", "global_sum_metric", "global_num_inst"}
# Of F1 and MCC, which keep an object with such numbers.
_COUNTS = "true_positives", "false_positives", "true_negatives", "false_negatives"
_COUNTERS = "_BinaryClassificationMetrics", "_ClassificationMetrics"  # in MXNet 1 and 2
# Of PCC: confusion matrices, which grow with the number of classes.
_MATRICES = {"lcm", "gcm"}
# Of PearsonCorrelation: number, means, sums of squared deviations and of their product.
_MOMENTS = "_label_nums", "_mean_l", "_mean_p", "_sse_l", "_sse_p", "_conv"

# Of a distributed metric: its original class; and whether its values are those of this worker for now.
_OVER, _IS_LOCAL = "_kvstore_hvd_over", "_kvstore_hvd_is_local"

# In a state: the classes of arrays of MXNet, by attribute, and what makes them.
_KINDS, _MAKERS = "kinds", {"NDArray": mx.nd.array, "ndarray": mx.np.array}

# What a copy of a metric uses as it is.
_SHARED = types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, mx.gluon.Block

_ROOM = 4096  # bytes of a worker's states in the first operation

_VALUES = "get", "get_name_value", "get_global", "get_global_name_value"

State = dict[str, Any]


def DistributedMetric(metric: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - made like an object
    """A metric whose values are those of one process that has seen the batches of all workers.

    ``update`` and ``reset`` concern this worker's samples. ``get``, ``get_name_value``, ``get_global`` and
    ``get_global_name_value`` are collective: every worker calls them, also one without a sample, and gets the same
    values. They change nothing. ``str()`` shows this worker's values, and waits for nobody.

    Parameters
    ----------
    metric : str, EvalMetric, callable or list of these
        As of MXNet's ``metric.create``; it is not changed.
    *args, **kwargs
        As of ``metric.create``.

    Returns
    -------
    EvalMetric
        Of a class that derives from the metric's.

    Raises
    ------
    InvalidRequestError
        When its value is asked for, on every worker: a class of the program keeps more than the sums of an EvalMetric.
    MismatchError
        Likewise: the workers have different metrics.
    """
    made = _library.create(metric, *args, **kwargs)
    return distribute(_plain(made))


def distribute(metric: Any) -> Any:
    """Make a metric one over all workers, in place; returns it."""
    kind: Any = getattr(metric, _OVER, type(metric))
    metric.__class__ = _class_over(kind)
    for part in metric.metrics if _is_composite(metric) else ():
        distribute(part)
    return metric


@contextlib.contextmanager
def of_this_worker(metrics: Iterable[Any]) -> Iterator[None]:
    """Within, until `of_all_workers`, the values of metrics are those of this worker."""
    for metric in metrics:
        vars(metric)[_IS_LOCAL] = True
    try:
        yield
    finally:
        of_all_workers(metrics)


def of_all_workers(metrics: Iterable[Any]) -> None:
    """End `of_this_worker`."""
    for metric in metrics:
        vars(metric).pop(_IS_LOCAL, None)


@functools.cache
def _class_over(kind: Any) -> Any:
    values = {name: functools.partialmethod(_value, name) for name in _VALUES if hasattr(kind, name)}
    own = {"__str__": lambda self: str(_plain(self)), "__reduce_ex__": lambda self, _: (distribute, (_plain(self),))}
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, _OVER: kind, **values, **own})


def _plain(metric: Any) -> Any:
    """A copy of the original class."""
    kind: Any = getattr(metric, _OVER, type(metric))
    made = kind.__new__(kind)
    for name, each in vars(metric).items():
        if _is_parts(metric, name):
            vars(made)[name] = list(map(_plain, each))
        else:
            vars(made)[name] = _try_to_copy(each)[1]
    return made


def _is_composite(metric: Any) -> bool:
    return isinstance(metric, _library.CompositeEvalMetric)


def _is_parts(metric: Any, name: str) -> bool:
    return name == "metrics" and _is_composite(metric)


def _copied(value: Any) -> Any:
    """A copy; of functions and networks the object itself. Raises what an object raises that cannot be copied."""
    if isinstance(value, _SHARED):
        return value
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _try_to_copy(value: Any) -> tuple[bool, Any]:
    try:
        return True, _copied(value)
    except Exception:  # noqa: BLE001 - whatever the object raises
        return False, value


def _value(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a method of the original class returns for the samples of all workers."""
    whole = _plain(self)
    if _IS_LOCAL not in vars(whole) and not process.current().member.is_alone:
        parts = list(_parts_of(whole))
        states = _gathered([_state_of(part) for part in parts])
        _check(states)
        for part, of_workers in zip(parts, zip(*states)):
            _merge(part, [state for _, state, _ in of_workers])
    return getattr(whole, name)(*args, **kwargs)


def _gathered(own: Any) -> list[Any]:
    """What all workers have, in the order of ranks; a single operation unless one has much."""
    world, data, room = process.current().member, np.frombuffer(pickle.dumps(own), np.uint8), _ROOM
    with world.submitting():
        while True:
            row = np.zeros(1 + room // 8, np.int64)
            row[0], row[1:].view(np.uint8)[: data.size] = data.size, data[:room]
            rows = world.all_rows("metric", "kvstore_hvd/metrics", "metric", row)
            longest = int(rows[:, 0].max())
            if longest <= room:
                return [pickle.loads(each[1:].tobytes()) for each in rows]
            room = -(-longest // 8) * 8


def _parts_of(metric: Any) -> Iterator[Any]:
    yield metric
    for each in metric.metrics if _is_composite(metric) else ():
        yield from _parts_of(each)


def _check(states: Sequence[Sequence[tuple[str, State, str]]]) -> None:
    """Raise, on all workers, unless all have the same metrics, whose states add up."""
    where: dict[str, Any] = {**process.current().topology.prefix, "operation": "metric"}
    told = [", ".join(name for name, _, _ in of_worker) or "none" for of_worker in states]
    kinds = {tuple(name.partition(" ")[0] for name, _, _ in of_worker) for of_worker in states}
    if len(kinds) > 1:  # names may differ: an Estimator changes them each time that it is made
        details = [f"rank {rank}: {names}" for rank, names in enumerate(told)]
        fix = "make the same metrics, in the same order, on every worker."
        raise MismatchError(message("workers have different metrics.", **where, details=details, fix=fix))
    faults = [f"rank {rank}: {fault}" for rank, each in enumerate(states) for _, _, fault in each if fault]
    if faults:
        fact = "a metric keeps more than sums, which do not tell its value over all workers."
        fix = "keep sum_metric and num_inst only; or gather the rest by hvd.allgather_object, and add it up."
        raise InvalidRequestError(message(fact, **where, details=faults, fix=fix))


def _state_of(metric: Any) -> tuple[str, State, str]:
    """Name of a metric; what it has counted; and why it cannot be merged, if so."""
    state, others = State({_KINDS: {}}), State()
    for name, each in vars(metric).items():
        if type(each).__name__ in _COUNTERS:
            state[name] = {count: _number(value) for count, value in vars(each).items() if count.endswith(_COUNTS)}
            state[name]["num_classes"] = getattr(each, "num_classes", None)
        elif name in _SUMS or name in _MATRICES or name in _MOMENTS or name == "_pred_nums":
            state[name] = _number(each)
            if hasattr(each, "asnumpy"):
                state[_KINDS][name] = type(each).__name__
        elif not _is_parts(metric, name):
            others[name] = each
    kind = type(metric).__name__
    fault = " ".join(f"{kind} has a dict in {name}." for name in _SUMS & set(state) if isinstance(state[name], dict))
    if not type(metric).__module__.startswith("mxnet."):
        stuck = [name for name, each in others.items() if not _try_to_copy(each)[0]]
        if stuck:  # a reset of the copy would change the object
            return f"{kind} '{metric.name}'", state, f"{kind} has {', '.join(stuck)}, which cannot be copied."
        fresh = _plain(metric)
        fresh.reset()
        changed = [name for name, each in others.items() if not _is_same(each, vars(fresh).get(name))]
        fault = fault or (f"{kind} has {', '.join(sorted(changed))}." if changed else "")
    return f"{kind} '{metric.name}'", state, fault


def _number(value: Any) -> Any:
    return value.asnumpy() if hasattr(value, "asnumpy") else value


def _is_same(one: Any, other: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether two values have the same numbers; functions and networks have none."""
    one, other = _number(one), _number(other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        return one.shape == other.shape and bool(np.all((one == other) | ((one != one) & (other != other))))
    if isinstance(one, (list, tuple, collections.deque)) and isinstance(other, type(one)):
        return len(one) == len(other) and all(_is_same(a, b, around) for a, b in zip(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key], around) for key in one)
    if isinstance(one, (str, bytes, int, float, complex, set, frozenset, np.generic)) or one is None:
        return bool(one == other) or (one != one and other != other)
    if type(one) is not type(other) or isinstance(one, _SHARED) or not hasattr(one, "__dict__") or id(one) in around:
        return type(one) is type(other)
    return _is_same(vars(one), vars(other), (*around, id(one)))


def _merge(metric: Any, states: Sequence[State]) -> None:
    """Give a metric the states of all workers together."""
    found: State = {}
    for name in _SUMS & set(states[0]):
        found[name] = _total([state[name] for state in states])
    for name in _MATRICES & set(states[0]):
        size = max(len(state[name]) for state in states)
        found[name] = sum(np.pad(state[name], (0, size - len(state[name]))) for state in states)
        metric.k = size
    for name, each in found.items():
        kind = next((state[_KINDS][name] for state in states if name in state[_KINDS]), None)
        vars(metric)[name] = _MAKERS[kind](each, dtype=each.dtype) if kind else each
    if _MOMENTS[0] in states[0]:
        moments = functools.reduce(_moments_of_both, ([state[name] for name in _MOMENTS] for state in states))
        vars(metric).update(zip(_MOMENTS, moments))
        metric._pred_nums = metric._label_nums
    for name, own in states[0].items():
        if isinstance(own, dict) and name != _KINDS:
            counted = [state[name] for state in states if state[name][_COUNTS[0]] is not None]
            _merge_counts(metric, vars(metric)[name], counted)


def _total(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of each of the numbers in lists. A worker without samples may have 0 or None instead."""
    lists = [each for each in values if isinstance(each, (list, tuple))]
    if lists:  # which may grow with the classes
        return [_total(each) for each in itertools.zip_longest(*lists, fillvalue=0)]
    numbers = [each for each in values if each is not None]
    return sum(numbers) if numbers else None


def _merge_counts(metric: Any, counter: Any, states: Sequence[State]) -> None:
    for count in states[0] if states else ():
        if count == "num_classes":
            counter.num_classes = states[0][count]
            continue
        total = sum(state[count] for state in states)
        vars(counter)[count] = mx.np.array(total, dtype="float64") if isinstance(total, np.ndarray) else total
    is_mean_of_batches = type(counter).__name__ == _COUNTERS[0] and "macro" in (
        vars(metric).get("average"),
        vars(metric).get("_average"),
    )
    if states and not is_mean_of_batches:
        kind: Any = next(each for each in type(metric).__mro__ if each.__module__.startswith("mxnet."))
        kind.update(metric, [], [])  # which computes the value of the counts


def _moments_of_both(one: list[Any], other: list[Any]) -> list[Any]:
    """Moments of two sets of samples together (Chan, Golub and LeVeque, 1979)."""
    (n, mean_l, mean_p, *sums), (m, other_l, other_p, *others) = one, other
    if not n or not m:
        return one if n else other
    by_l, by_p, weight = other_l - mean_l, other_p - mean_p, n * m / (n + m)
    between = by_l * by_l, by_p * by_p, by_l * by_p
    sums = [a + b + weight * each for a, b, each in zip(sums, others, between)]
    return [n + m, mean_l + by_l * m / (n + m), mean_p + by_p * m / (n + m), *sums]
