"""Two actions around the first import of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportHook:
    """A finder for ``sys.meta_path`` that runs `before` and `after` around the first import of one module."""

    # It steps aside once the import has succeeded, and stays when it failed or when the module was only looked for
    # (``importlib.util.find_spec``). A finder must import nothing: the interpreter holds the lock of all imports while
    # it asks finders, and a thread that imports another module waits for that lock with the other module's.

    def __init__(self, module: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.module = module
        self.before = before
        self.after = after

    def install(self) -> None:
        """Put the hook before all other finders."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]  # a finder needs no base class

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system defines it: the spec that the later finders give, with a loader around its loader."""
        if name != self.module or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # type: ignore[arg-type]
        for finder in later:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Runs a hook's two actions around the real loader's work; anything else is the real loader's."""

    def __init__(self, loader: Any, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if nobody had been here: pickle, pkgutil and reload look at these.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook.before()
        self._loader.exec_module(module)
        self._hook.after()
        if self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
