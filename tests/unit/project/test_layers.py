"""The layers of the package: imports go strictly downward, and each outside thing is touched in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kvstore_hvd"
NATIVE = ROOT / "native"

# From the bottom to the top. A unit (a module, or a package with all its modules) may import what stands in a lower
# layer, or before it in its own.
LAYERS = (
    ("errors", "log", "horovod_variables", "config", "dlpack", "clocks"),
    (
        "records",
        "native",
        "mxnet_compat",
        "gpu",
        "topology",
        "descriptors",
        "leaving",
        "membership",
        "mpi_calls",
        "mpi_world",
        "mpi_notice",
        "mpi_exit",
        "mpi_members",
        "mpi_recovery",
        "bootstrap",
        "authentication",
        "rendezvous",
        "wire",
        "messages",
        "worker_line",
        "affinity",
        "cores",
        "stacks",
        "namespaces",
    ),
    ("comm",),
    ("recording",),
    ("stall", "member", "inner_worlds", "engine"),
    (
        "numbering",
        "gpu_ops",
        "numpy_ops",
        "timeline",
        "divergence",
        "compression",
        "keys",
        "arrays",
        "placement",
        "usage",
        "steps",
        "reduction",
        "sparse",
        "operations",
        "kvstore",
        "trainer",
        "join",
        "mxnet",
    ),
    ("elastic",),
    ("horovod_alias", "launcher", "driver", "launch", "calling", "as_horovod", "__main__"),
)
ORDER = {unit: position for position, unit in enumerate(unit for layer in LAYERS for unit in layer)}
# Names only: they gather what the layers offer.
FACADE = "__init__"
FACADES = {PACKAGE / "mxnet" / "elastic.py"}
ENVIRONMENT_READERS = {"config", "launch"}

MODULES = sorted(PACKAGE.rglob("*.py"))
CORE = sorted(path for folder in ("include", "src") for path in (NATIVE / folder).rglob("*.[ch]pp"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def unit(path: Path) -> str:
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


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_go_downward(path: Path) -> None:
    here = unit(path)
    if here == FACADE or path in FACADES:
        return
    assert here in ORDER, f"{name(path)}: give the new unit {here!r} a layer in this test"
    wrong = []
    for line, imported in imports(path):
        parts = imported.split(".")
        if parts[0] != "kvstore_hvd" or len(parts) == 1:
            continue
        there = parts[1]
        if there.startswith("__") or there == "_native":  # __version__; _native has its own test
            continue
        if there != here and (there not in ORDER or ORDER[there] >= ORDER[here]):
            wrong.append(f"{name(path)}:{line} imports {imported}")
    assert not wrong, "not downward:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_native_imports_the_extension(path: Path) -> None:
    users = [line for line, imported in imports(path) if imported.startswith("kvstore_hvd._native")]
    assert not users or unit(path) == "native", f"{name(path)}:{users[0]} imports _native; only native.py may"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_config_reads_the_environment(path: Path) -> None:
    if unit(path) in ENVIRONMENT_READERS:
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
