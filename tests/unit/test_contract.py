"""docs/contract.md: every row names tests, every test exists, and every public name is in a row."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import kvstore_hvd.elastic
import kvstore_hvd.join
import kvstore_hvd.mxnet

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contract.md"
# Behaviour and tests of each row.
ROWS = [
    (behaviour.strip(), tests)
    for behaviour, tests in re.findall(r"^\| (.+) \| (.*)\|$", PAGE.read_text(), re.MULTILINE)
    if behaviour != "Behaviour"
]


@functools.cache
def names_of_tests(path: str) -> set[str]:
    """The names of a file's tests; those of a class with its name before them."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        members = [(f"{node.name}::", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        found |= {prefix + each.name for prefix, each in members if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_there_are_rows() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| Tests |" not in line]
    assert len(ROWS) == len(lines) > 50, "a line of a table is no row: | behaviour | `tests/...::test_...` |"


@pytest.mark.parametrize(("behaviour", "tests"), ROWS, ids=[behaviour for behaviour, _ in ROWS])
def test_each_row_names_tests_that_exist(behaviour: str, tests: str) -> None:
    named = re.findall(r"`([^`]+)`", tests)
    assert named, "no test proves it"
    assert re.fullmatch(r"(`[^`]+` )+", tests), f"more than tests: {tests}"
    for each in named:
        path, _, name = each.partition("::")
        assert re.fullmatch(r"tests/(\w+/test_\w+\.py|native/\w+\.cpp)", path), f"{each} is no test"
        assert (ROOT / path).exists(), f"there is no {path}"
        if path.endswith(".cpp"):
            assert f'"{name}"' in (ROOT / path).read_text(), f"{path} has no test of this text: {name}"
        else:
            assert name in names_of_tests(path), f"{path} has no {name}"


@pytest.mark.parametrize(
    "module", [kvstore_hvd.mxnet, kvstore_hvd.join, kvstore_hvd.elastic], ids=lambda module: module.__name__
)
def test_every_public_name_is_in_a_row(module: object) -> None:
    words = {word for behaviour, _ in ROWS for code in re.findall(r"`([^`]*)`", behaviour) for word in code_words(code)}
    missing = sorted(set(module.__all__) - words)  # type: ignore[attr-defined]
    assert not missing, f"docs/contract.md has no row with {', '.join(missing)}"


def code_words(code: str) -> list[str]:
    return re.findall(r"\w+", code)
