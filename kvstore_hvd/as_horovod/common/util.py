"""``horovod.common.util``: which frameworks there are, and how a list is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvstore_hvd.errors import message

__all__ = ["check_extension", "extension_available", "gpu_available", "is_iterable", "split_list"]

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is support for a framework, ``'mxnet'`` or another of Horovod's names."""
    return ext_base_name == "mxnet"


def check_extension(ext_name: str, *args: Any) -> None:
    """Check that there is support for a framework, by the name of its module (``'horovod.mxnet'``).

    Raises
    ------
    ImportError
        It is another framework than MXNet.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            message(
                f"Extension {ext_name} is not available: kvstore_hvd answers for Horovod here, and is for MXNet.",
                fix="import horovod.mxnet; for other frameworks install Horovod.",
            )
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether arrays on a GPU can be reduced: not yet."""
    return False


def is_iterable(x: object) -> bool:
    """Whether `x` can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Split `items` into `num_parts` runs of neighbours whose lengths differ by one at most, the longer ones first.

    Raises
    ------
    ValueError
        `num_parts` is below 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected at least 1.")
    length, longer = divmod(len(items), num_parts)
    starts = [part * length + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:])]
