"""Updates of parameters in one pass over their memory, in the place of MXNet's operators, with the same bits.

MXNet's optimizers call operators such as `sgd_update`, which take 3 to 5 ns an element on a core; ours take 0.4 to 0.8.
Counts, schedules and multipliers stay the optimizer's own; so subclasses, AMP and Modules have them, too. Ours are used
for dense arrays on the CPU, of float32 or with a float32 copy of float16, while nothing is recorded; MXNet's are used
for all others. ``KVHVD_FUSED_UPDATE=0`` leaves all to MXNet.

The formulas of MXNet 1 and 2 differ in their rounding. The first call of an operator looks for the one that has the
bits of this MXNet; without one MXNet's operator stays.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.mxnet_compat import hooks

# `Rule` of native/reduce/update.hpp.
_SGD_1, _MULTI_SGD_1, _SGD_2, _MOM_1, _MOM_2, _NAG_1, _NAG_2 = range(7)
_MIXED_NAG_2, _ADAM_1, _ADAM_2, _ADAMW, _LAMB_1, _LAMB_2 = range(7, 13)


class _Operator(NamedTuple):
    states: int  # arrays beside a weight, its gradient and its copy
    rules: tuple[int, ...]


# "multi_": of several parameters; "mp_": with float32 copies of float16.
_OPERATORS = {
    name: _Operator(states, rules)
    for states, rules, names in (
        (0, (_SGD_1, _MULTI_SGD_1, _SGD_2), "sgd_update mp_sgd_update multi_sgd_update multi_mp_sgd_update"),
        (1, (_MOM_1, _MOM_2), "sgd_mom_update mp_sgd_mom_update multi_sgd_mom_update multi_mp_sgd_mom_update"),
        (1, (_NAG_1, _NAG_2, _MIXED_NAG_2), "nag_mom_update mp_nag_mom_update"),
        (2, (_ADAM_1, _ADAM_2), "adam_update"),
        (2, (_ADAMW,), "multi_adamw_update multi_mp_adamw_update"),
        (2, (_LAMB_1, _LAMB_2), "multi_lamb_update multi_mp_lamb_update"),
    )
    for name in names.split()
}
# The modules whose optimizers call them: of MXNet 1, and of MXNet 2.
_MODULES = ("optimizer", "sgd", "nag", "adam", "adamW", "lamb")


def patch(mxnet: Any) -> None:
    """Let MXNet's optimizers call the operators here."""
    for module in _MODULES:
        owner = getattr(mxnet.optimizer, module, None)
        for name in _OPERATORS if owner is not None else ():
            hooks.wrap(owner, name, functools.partial(_standing_in, name))


def _standing_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    rule = functools.cache(lambda: _rule_of(name, original))

    def update(*arrays: Any, **parameters: Any) -> Any:
        arguments = _read_call(name, arrays, **parameters)
        if arguments is None or hooks.require_mxnet().autograd.is_recording():
            return original(*arrays, **parameters)
        chosen = rule()
        if chosen is None or not hooks.local_operations().update(name, chosen, *arguments):
            return original(*arrays, **parameters)
        return parameters["out"]

    return update


def _read_call(
    name: str,
    arrays: Sequence[Any],
    /,
    out: Any = None,
    lr: Any = None,
    wd: Any = 0.0,
    lrs: Sequence[float] = (),
    wds: Sequence[float] = (),
    etas: Sequence[float] = (),
    step_count: Sequence[float] = (),
    bias_correction: bool = True,
    **shared: Any,
) -> Optional[tuple[list[int], list[tuple[float, ...]], bool, int]]:
    """Arrays and numbers of a call of MXNet's operator; None if it is one that only MXNet understands."""
    shared.pop("lazy_update", None)  # of no meaning for dense arrays
    told = [shared.pop(key) for key in ("num_weights", "num_tensors", "size") if key in shared] or [1]
    states, is_mixed, scale = _OPERATORS[name].states, "mp_" in name, 0
    try:
        if _has_lists(name):
            arrays = [array for parameter in zip(*arrays) for array in parameter]
        if "adamw" in name:
            scale = shared.pop("rescale_grad").handle.value
        if not name.startswith("multi_"):
            out, lrs, wds = [out], [_as_mxnet_reads(lr)], [_as_mxnet_reads(wd)]
        numbers = _read_shared(states == 2, **{key: str(each) for key, each in shared.items()}) or (math.nan,)
        handles = [array.handle.value for array in arrays]
        zeros = [0.0] * len(lrs)
        steps = step_count if bias_correction and step_count else zeros
        how = [(*each, *numbers) for each in zip(lrs, wds, etas or zeros, steps)]
        is_usual = _are_usual(lrs) and _are_usual(wds) and _are_usual(etas) and (steps is zeros or all(steps))
    except (AttributeError, KeyError, TypeError):
        return None
    stride = 2 + states + is_mixed
    is_counted = not name.startswith("multi_") or _has_lists(name) or told == [len(out)]
    is_in_place = 0 < len(out) == len(how) and all(one is other for one, other in zip(out, arrays[::stride]))
    is_whole = is_counted and is_in_place and len(handles) == stride * len(how)
    is_usual = is_usual and is_whole and not any(map(math.isnan, numbers))
    return (handles, how, is_mixed, scale) if is_usual else None


def _are_usual(numbers: Sequence[Any]) -> bool:
    """Whether MXNet reads a list of numbers as they are: finite ones, as float32 has them."""
    return all(abs(each) <= _LARGEST and not isinstance(each, bool) for each in numbers)


def _has_lists(name: str) -> bool:
    """Whether MXNet's function has an argument for each kind of array, a list."""
    return "adamw" in name or "lamb" in name


@functools.lru_cache(maxsize=1024)
def _read_shared(has_moments: bool, **given: str) -> Optional[tuple[float, ...]]:
    """Numbers that count for all parameters of a call, in the order of `LocalOperations.update`; None for others."""
    shared = {"rescale_grad": 1.0, "clip_gradient": -1.0, "momentum": 0.0}
    shared |= {"beta1": 0.0, "beta2": 0.0, "epsilon": 0.0, "lower_bound": -1.0, "upper_bound": -1.0}
    needed = {"beta1", "beta2", "epsilon"} if has_moments else set()
    if not needed <= given.keys() <= shared.keys():
        return None
    return tuple(_read(given.get(key, str(default))) for key, default in shared.items())


_LARGEST = 3.4028234e38
_NUMBER = re.compile(r"(-?)(\d{1,15})(?:\.(\d+))?(?:e([+-])(\d\d))?")


def _as_mxnet_reads(number: Any) -> float:
    """The float32 that MXNet takes a parameter for, often not the nearest; NaN for unusual ones."""
    return _read(str(number))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> float:
    # dmlc/strtonum.h: at most 19 decimals, added to what is before them, and powers of ten multiplied step by step.
    import numpy as np

    match = _NUMBER.fullmatch(text)
    if match is None:
        return math.nan
    sign, whole, decimals, direction, exponent = match.groups(default="")
    decimals = decimals[:19]
    value = np.float32(int(whole)) + np.float32(float(int(decimals or 0)) / float(10 ** len(decimals)))
    scale, left = np.float32(1), int(exponent or 0)
    if left > 37:  # where MXNet cuts or refuses
        return math.nan
    for step, power in ((8, np.float32(1e8)), (1, np.float32(10))):
        while left >= step:
            scale, left = scale * power, left - step
    value = value / scale if direction == "-" else value * scale
    return float(-value if sign else value)


def _rule_of(name: str, original: Callable[..., Any]) -> Optional[int]:
    """The rule that has the bits of MXNet's operator; None if there is none."""
    if not config().fused_update:
        return None
    for rule in _OPERATORS[name].rules:
        if all(_has_equal_bits(name, original, rule, clip) for clip in (-1.0, 0.7)):
            return rule
    text = "the updates with %s are MXNet's own, and slower: this MXNet computes them in a way that is not known here."
    log.once(f"update-{name}", logging.INFO, text, name)
    return None


def _has_equal_bits(name: str, original: Callable[..., Any], rule: int, clip: float) -> bool:
    import numpy as np

    mx = hooks.require_mxnet()
    random, states, is_mixed = np.random.RandomState(5), _OPERATORS[name].states, "mp_" in name
    kinds = ["float16" if is_mixed else "float32"] * 2 + ["float32"] * (states + is_mixed)
    values = [random.standard_normal(999) * random.choice([1e-3, 1, 30], 999) for _ in kinds]
    values[3:4] = [abs(each) for each in values[3:4]]  # a variance
    # Numbers that MXNet reads in a way of its own.
    numbers: dict[str, Any] = {"rescale_grad": 0.0314, "clip_gradient": clip}
    numbers |= [{}, {"momentum": 0.9137}, {"beta1": 0.8731, "beta2": 0.9917, "epsilon": 1.3e-06}][states]
    if name.startswith("multi_"):
        numbers |= {"lrs": [0.0287], "wds": [0.0123]}
    else:
        numbers |= {"lr": 0.0287, "wd": 0.0123}
    if "lamb" in name:
        numbers |= {"step_count": [3]} | ({"upper_bound": 2.3} if clip > 0 else {})
    elif "adamw" in name:
        numbers |= {"rescale_grad": mx.nd.array([0.0314]), "etas": [0.7]}
    elif name.startswith("multi_"):
        numbers |= {"num_weights": 1}
    found = []
    for is_ours in (False, True):
        arrays = [mx.nd.array(value, mx.cpu(), dtype=kind) for value, kind in zip(values, kinds)]
        given = [[array] for array in arrays] if _has_lists(name) else arrays
        call = {**numbers, "out": arrays[:1] if name.startswith("multi_") else arrays[0]}
        if not is_ours:
            original(*given, **call)
        else:
            arguments = _read_call(name, given, **call)
            if arguments is None or not hooks.local_operations().update(name, rule, *arguments):
                return False
        found.append([array.asnumpy().tobytes() for array in arrays])
    return found[0] == found[1]
