"""The name ``horovod`` for this package, so that ``import horovod.mxnet`` finds it where Horovod is not installed.

A table maps names of Horovod to modules of this package. A module is imported when a program imports its name, and both
names mean the same module. Horovod, if it is installed, has precedence.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.errors import message

_ROOT = "horovod"
# The longest matching name counts. The rest of the name is that of a submodule.
_NAMES = {
    _ROOT: "kvstore_hvd.horovod",
    "horovod.mxnet": "kvstore_hvd.mxnet",
    "horovod.mxnet.compression": "kvstore_hvd.mxnet.calls",
    "horovod.common": "kvstore_hvd.horovod",
    "horovod.common.exceptions": "kvstore_hvd.errors",
    "horovod.runner": "kvstore_hvd.horovod",
}
_WRAPPED = "_kvstore_hvd_wraps"


def install() -> None:
    """Let ``import horovod`` find this package, here and in processes that multiprocessing spawns."""
    # With Horovod installed, it only logs a warning. May be called again.
    present = sys.modules.get(_ROOT)
    if present is not None and not _is_ours(present):
        _tell_of_another(getattr(present, "__file__", None))
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _reach_spawned_processes()


def uninstall() -> None:
    """Find no more names; imported modules stay."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def installed_horovod() -> ModuleSpec | None:
    """The specification of a module 'horovod' that is not ours, or None. Imports nothing."""
    for finder in sys.meta_path:
        find_spec: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
        if isinstance(finder, _Finder) or find_spec is None:
            continue
        spec = find_spec(_ROOT, None)
        if spec is None or spec.origin is None:  # a folder without __init__.py has none
            continue
        if os.path.exists(os.path.join(os.path.dirname(spec.origin), "of_kvstore_hvd")):  # see kvstore-hvd-horovod
            return None
        return spec
    return None


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == _NAMES[_ROOT]


def _tell_of_another(where: object) -> None:
    log.once(
        "another-horovod",
        logging.WARNING,
        "a module 'horovod' is installed (%s), and it is what `import horovod` means; this package answers for that "
        "name only where there is none.",
        where or "of unknown origin",
    )


# -- Finding and loading ------------------------------------------------------------------------------------------


class _Finder:
    """A finder for ``sys.meta_path`` that knows the names of the table and their submodules."""

    # It comes first: a folder 'horovod' in the path (a checkout of Horovod's examples) would pass for a package.

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module by its name in Horovod; None for other names."""
        if name == _ROOT:
            other = installed_horovod()
            if other is not None:
                uninstall()
                _tell_of_another(other.origin)
                return None
        elif not name.startswith(_ROOT + ".") or not _is_ours(sys.modules.get(_ROOT)):
            return None
        real_name = _real_name(name)
        real = _spec_of(real_name)
        if real is None:
            raise ModuleNotFoundError(
                message(
                    f"No module named '{name}': kvstore_hvd answers for Horovod here, and offers what MXNet needs.",
                    details=[
                        "offered: horovod.mxnet (with elastic, mpi_ops, compression, functions, process_sets), "
                        "horovod.common.exceptions, horovod.runner, horovod.run()"
                    ],
                    fix="import horovod.mxnet; for other frameworks install Horovod.",
                ),
                name=name,
            )
        spec = ModuleSpec(name, _Loader(real_name), origin=real.origin)
        # A list makes it a package, whose submodules this finder finds.
        spec.submodule_search_locations = None if real.submodule_search_locations is None else []
        return spec


class _Loader(Loader):
    """Loads a name by importing its module."""

    def __init__(self, real_name: str) -> None:
        self._real_name = real_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module."""
        module = importlib.import_module(self._real_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification of the module, which the import has replaced by that of the name."""
        module.__spec__ = self._spec


def _real_name(name: str) -> str:
    known = max((each for each in _NAMES if name == each or name.startswith(each + ".")), key=len)
    return _NAMES[known] + name[len(known) :]


def _spec_of(real_name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(real_name)
    except ModuleNotFoundError as error:
        # A parent is no package, or is missing. Other missing modules are real errors.
        if error.name is None or not (real_name + ".").startswith(error.name + "."):
            raise
        return None


# -- Processes that multiprocessing spawns ------------------------------------------------------------------------


class _ImportUs:
    """Imports this package where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("kvstore_hvd",)


def _reach_spawned_processes() -> None:
    """Have spawned processes import this package before the program's main module, which imports horovod."""
    # The import installs the alias, by an inherited variable (`kvstore_hvd.config.pass_alias_on`).
    from multiprocessing import spawn

    original = spawn.get_preparation_data
    if hasattr(original, _WRAPPED):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        # Unpickled in this order. multiprocessing ignores unknown keys.
        return {"kvstore_hvd": _ImportUs(), **original(name)}

    setattr(get_preparation_data, _WRAPPED, original)
    spawn.get_preparation_data = get_preparation_data
