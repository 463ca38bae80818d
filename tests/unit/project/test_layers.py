"""The layers of the package: imports go strictly downward, and each outside thing is touched in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kvstore_hvd"
NATIVE = ROOT / "native"

# From the bottom to the top. The modules of a room (a folder, or a module beside the folders) may import each other, as
# long as that goes around no circle, and whatever stands in the rooms below.
ROOMS = (
    "errors",
    "log",
    "base",
    "horovod",
    "config",
    "native",
    "mxnet_compat",
    "gpu",
    "wire",
    "worlds",
    "comm",
    "recording",
    "process",
    "store",
    "ops",
    "timeline",
    "join",
    "mxnet",
    "elastic",
    "launcher",
    "driver",
    "launch",
    "calling",
    "as_horovod",
    "__main__",
)
# Names only: they gather what the layers offer.
FACADE = "__init__"
FACADES = {PACKAGE / "mxnet" / "elastic.py"}
ENVIRONMENT_READERS = {"config", "launch"}

# Of native/, likewise. The rooms of the core know neither Python nor MXNet; the kernels for GPUs (cuda/) are compiled
# by another compiler, and include nothing of the others.
CORE_ROOMS = ("base", "reduce", "shm", "request", "report", "engine", "link")
NATIVE_ROOMS = (*CORE_ROOMS, "mxnet", "bindings")

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(NATIVE.rglob("*.[ch]pp"))
CORE = [path for path in SOURCES if path.relative_to(NATIVE).parts[0] in CORE_ROOMS]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported, also inside functions and for type checkers only."""
    package = ("kvstore_hvd", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def test_there_are_modules() -> None:
    assert MODULES, f"no modules in {PACKAGE}"
    assert CORE, f"no sources in {NATIVE}"


def imported_modules(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield line and file of the modules of this package that a module imports."""
    for line, imported in imports(path):
        parts = imported.split(".")
        if parts[0] != PACKAGE.name:
            continue
        # A name that is no module is one of the module before it.
        for length in range(len(parts), 1, -1):
            there = ROOT.joinpath(*parts[:length])
            found = [each for each in (there.with_suffix(".py"), there / "__init__.py") if each.is_file()]
            if found:
                yield line, found[0]
                break


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_go_downward(path: Path) -> None:
    here = room(path)
    if here == FACADE or path in FACADES:
        return
    assert here in ROOMS, f"{name(path)}: give the new room {here!r} a place in this test"
    wrong = [
        f"{name(path)}:{line} imports {name(there)}"
        for line, there in imported_modules(path)
        if room(there) != here and ROOMS.index(room(there)) >= ROOMS.index(here)
    ]
    assert not wrong, "not downward:\n" + "\n".join(wrong)


def test_imports_go_around_no_circle() -> None:
    graph = {path: {there for _, there in imported_modules(path)} - {path} for path in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(name(path) for path in error.args[1]))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_native_imports_the_extension(path: Path) -> None:
    users = [line for line, imported in imports(path) if imported.startswith("kvstore_hvd._native")]
    assert not users or room(path) == "native", f"{name(path)}:{users[0]} imports _native; only native/ may"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_config_reads_the_environment(path: Path) -> None:
    if room(path) in ENVIRONMENT_READERS:
        return
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "environb", "getenv", "putenv"))
    ]
    assert not lines, f"{name(path)}:{lines[0]} touches the environment; only config.py reads it"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_heavy_libraries_are_imported_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text(), str(path))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    heavy = {imported for imported in names if imported.split(".")[0] in ("mxnet", "mpi4py", "cupy", "horovod")}
    assert not heavy, f"{name(path)} imports {heavy} as soon as it is imported itself"


INCLUDE = re.compile(r'^\s*#\s*include "(.+)"', re.MULTILINE)


def test_includes_go_downward() -> None:
    wrong = []
    for path in SOURCES:
        here = path.relative_to(NATIVE).parts[0]
        if here == "cuda":
            continue
        for included in INCLUDE.findall(path.read_text()):
            there = included.split("/")[0]
            if there not in NATIVE_ROOMS or NATIVE_ROOMS.index(there) > NATIVE_ROOMS.index(here):
                wrong.append(f"{name(path)} includes {included}")
    assert not wrong, "not downward:\n" + "\n".join(wrong)


def test_includes_go_around_no_circle() -> None:
    graph = {str(path.relative_to(NATIVE)): set(INCLUDE.findall(path.read_text())) for path in SOURCES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("path", CORE, ids=name)
def test_core_includes_nothing_foreign(path: Path) -> None:
    foreign = re.compile(r"\b(Python\.h|pybind11|mxnet|mpi\.h|dmlc|dlpack|cuda|nccl)", re.IGNORECASE)
    wrong = [
        f"{name(path)}:{number} {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*#\s*include", line) and foreign.search(line)
    ]
    assert not wrong, "the core knows neither Python, MXNet, MPI nor CUDA:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", sorted((NATIVE / "mxnet").rglob("*.[ch]pp")), ids=name)
def test_adapter_includes_no_python(path: Path) -> None:
    wrong = [line for line in path.read_text().splitlines() if re.match(r"\s*#\s*include.*(Python\.h|pybind11)", line)]
    assert not wrong, f"{name(path)}: {wrong}"
