"""``horovod.common.util``: which frameworks there are and what the build can do, and small helpers."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore_hvd.as_horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from kvstore_hvd.config import changed_environment as env
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet import basics
from kvstore_hvd.mxnet_compat import require_mxnet

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

Item = TypeVar("Item")

#: The frameworks that there is support for.
EXTENSIONS = ["mxnet"]

# As Horovod's helper of this name: what a function has returned is kept for each list of arguments.
_cache = functools.lru_cache(maxsize=None)


# -- Frameworks ---------------------------------------------------------------------------------------------------


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is support for a framework, ``'mxnet'`` or another of Horovod's names; `verbose` prints it."""
    return _told(ext_base_name in EXTENSIONS, ext_base_name, "built", verbose)


def check_extension(ext_name: str, *args: Any) -> None:
    """Check that there is support for a framework, by the name of its module (``'horovod.mxnet'``)."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(
            message(
                f"Extension {ext_name} is not available: kvstore_hvd answers for Horovod here, and is for MXNet.",
                fix="import horovod.mxnet; for other frameworks install Horovod.",
            )
        )


def get_ext_suffix() -> str:
    """How the names of extension modules end with this Python."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """The path of an extension module: its folders and its name, beside the file `pkg_path`."""
    if not args:
        raise InvalidRequestError(message("the name of the extension is missing.", fix="pass it last."))
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Check that a framework has the version that is installed: nothing here is built against another one."""
    # Warns where it has not, or with an `exception`, which came of that, raises.
    installed = _installed_version(name)
    if installed == version:
        return
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, installed) from exception
    warnings.warn(get_version_mismatch_message(name, version, installed), stacklevel=2)


def _installed_version(name: str) -> str | None:
    told = getattr(sys.modules.get(name), "__version__", None)
    if told is not None:
        return str(told)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- The build ----------------------------------------------------------------------------------------------------


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this framework has a GPU here, and arrays on it can be reduced."""
    found = ext_base_name == "mxnet" and basics.cuda_built() and require_mxnet().context.num_gpus() > 0
    return _told(found, ext_base_name, "running with GPU", verbose)


def mpi_built(verbose: bool = False) -> bool:
    """As `kvstore_hvd.mxnet.mpi_built`; `verbose` prints it, as for all that follow."""
    return _told(basics.mpi_built(), "mxnet", "built with MPI", verbose)


def gloo_built(verbose: bool = False) -> bool:
    """As `kvstore_hvd.mxnet.gloo_built`."""
    return _told(basics.gloo_built(), "mxnet", "built with Gloo", verbose)


def nccl_built(verbose: bool = False) -> int:
    """As `kvstore_hvd.mxnet.nccl_built`."""
    return _told(basics.nccl_built(), "mxnet", "built with NCCL", verbose)


def ddl_built(verbose: bool = False) -> bool:
    """As `kvstore_hvd.mxnet.ddl_built`."""
    return _told(basics.ddl_built(), "mxnet", "built with DDL", verbose)


def ccl_built(verbose: bool = False) -> bool:
    """As `kvstore_hvd.mxnet.ccl_built`."""
    return _told(basics.ccl_built(), "mxnet", "built with CCL", verbose)


def _told(value: Item, extension: str, what: str, verbose: bool) -> Item:
    if verbose:
        print(f"Extension {extension} {'was' if value else 'was NOT'} {what}.")
    return value


# -- Helpers ------------------------------------------------------------------------------------------------------


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """A function that makes one op of a call's `op` and its older parameter `average`; `reduce_ops` has the ops."""

    def chosen(op: Any, average: bool | None) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            fact = "The op parameter supersedes average. Please provide only one of them."
            raise InvalidRequestError(message(fact, fix="omit average."))
        warnings.warn("average is an older name: use op.", DeprecationWarning, stacklevel=2)
        return reduce_ops.Average if average else reduce_ops.Sum

    return chosen


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Whether `x` can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Split `items` into `num_parts` runs of neighbours whose lengths differ by one at most, the longer ones first."""
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected at least 1.")
    length, longer = divmod(len(items), num_parts)
    starts = [part * length + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:])]


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is at least a target of the form ``'major.minor.patch'``."""
    for given in (ver, target):
        if not isinstance(given, str):
            raise InvalidRequestError(message(f"{given!r} is no version.", fix="pass texts, such as '1.9.1'."))
    if len(target.split(".")) != 3:
        raise InvalidRequestError(message(f"'{target}' is no target version.", fix="pass major.minor.patch."))
    return _parts(ver) >= _parts(target)


def _parts(version: str) -> list[tuple[int, str]]:
    """Numbers by value, and letters after them: a release comes after its candidates only where it says more."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[a-zA-Z]+", version)]
