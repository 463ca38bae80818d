"""Every public name says what it is, and every function says what it raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kvstore_hvd"
MODULES = sorted(PACKAGE.rglob("*.py"))

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def public(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the public classes, functions and methods below ``node``; what is defined inside a function is private."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented) and not child.name.startswith("_"):
            yield inside + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{inside}{child.name}.")
        elif isinstance(child, (ast.If, ast.Try)):
            yield from public(child, inside)


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return, for every class of the package, its documented methods and the names of its bases."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {
                    child.name for child in node.body if isinstance(child, Function) and ast.get_docstring(child)
                }
                found[node.name] = (methods, {last_name(base) for base in node.bases})
    return found


CLASSES = classes()


def inherits_docstring(class_name: str, method: str, seen: frozenset[str] = frozenset()) -> bool:
    bases = CLASSES.get(class_name, (set(), set()))[1] - seen
    return any(
        method in CLASSES.get(base, (set(), set()))[0] or inherits_docstring(base, method, seen | {class_name})
        for base in bases
    )


def is_accessor_part(node: ast.AST) -> bool:
    """Tell whether ``node`` is the setter of a property or an overload: the docstring stands at the other part."""
    decorators = getattr(node, "decorator_list", [])
    return any(last_name(decorator) in ("setter", "deleter", "overload") for decorator in decorators)


def raised(function: ast.AST) -> set[str]:
    """Return the names of the exceptions that the body raises itself, nested functions left out."""
    names = set()
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (*Documented, ast.Lambda)):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised_name = last_name(child.exc.func if isinstance(child.exc, ast.Call) else child.exc)
            if raised_name[:1].isupper() and raised_name not in ("NotImplementedError", "StopIteration"):
                names.add(raised_name)
        names |= raised(child)
    return names


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(), str(path))
    missing = [] if ast.get_docstring(tree) else [f"{name(path)}: the module"]
    for full_name, node in public(tree):
        class_name, _, method = full_name.rpartition(".")
        if ast.get_docstring(node) or is_accessor_part(node) or inherits_docstring(class_name, method):
            continue
        missing.append(f"{name(path)}:{node.lineno} {full_name}")
    assert not missing, "without a docstring:\n" + "\n".join(missing)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_raised_errors_are_documented(path: Path) -> None:
    missing = []
    for full_name, node in public(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, Function) or is_accessor_part(node):
            continue
        class_name, _, method = full_name.rpartition(".")
        text = ast.get_docstring(node)
        if text is None and inherits_docstring(class_name, method):
            continue
        if re.search(r"raises as `|Raises\n------\n.*\bas `", text or "", re.IGNORECASE | re.DOTALL):
            continue  # the docstring of the other function says it
        unnamed = sorted(error for error in raised(node) if not re.search(rf"\b{error}\b", text or ""))
        if unnamed:
            missing.append(f"{name(path)}:{node.lineno} {full_name}: {', '.join(unnamed)}")
    assert not missing, "raised, but not in the docstring:\n" + "\n".join(missing)


def test_every_error_is_explained() -> None:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    errors = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    page = ROOT / "docs" / "errors.md"
    assert page.exists(), "docs/errors.md, the page that explains every error, is missing"
    missing = [error for error in errors if not re.search(rf"\b{error}\b", page.read_text())]
    assert not missing, f"docs/errors.md does not explain {', '.join(missing)}"
