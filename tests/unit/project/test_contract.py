"""docs/contract.md: every row names tests that CI runs, every public name is in a row, and it says what is run."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import run as suite

import kvstore_hvd.elastic
import kvstore_hvd.join
import kvstore_hvd.mxnet
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "contract.md"
WHAT_IS_RUN, _, _BEHAVIOURS = PAGE.read_text().partition("## The world")
# Behaviour and tests of each row.
ROWS = [
    (behaviour.strip(), tests)
    for behaviour, tests in re.findall(r"^\| (.+) \| (.*)\|$", _BEHAVIOURS, re.MULTILINE)
    if behaviour != "Behaviour"
]
BY_HAND = {"soak", "fuzz", "gpu"}
DEFAULT_ENVIRONMENT = {"MXNET": "1.9.1", "MPI": "openmpi"}
MPI_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}

Plan = set[tuple[str, "str | None", int]]


@functools.cache
def functions_of(path: str) -> dict[str, set[str]]:
    """The names of a file's tests, those of a class with its name before them, and the markers of each."""
    tree = ast.parse((ROOT / path).read_text()).body
    of_module = [
        node.value for node in tree if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)
    ]
    found = {}
    for node in tree:
        inside = isinstance(node, ast.ClassDef)
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                of_class = node.decorator_list if isinstance(node, ast.ClassDef) else []
                marks = [*of_module, *of_class, *each.decorator_list]
                found[f"{node.name}::{each.name}" if inside else each.name] = set().union(*map(markers, marks))
    return found


def markers(decorator: ast.expr) -> set[str]:
    """The names of markers in an expression; those of single parameters are none of the test's."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
        return set()
    return set(re.findall(r"mark\.(\w+)", ast.unparse(decorator)))


def test_there_are_rows() -> None:
    lines = [line for line in _BEHAVIOURS.splitlines() if line.startswith("| ") and "| Tests |" not in line]
    assert len(ROWS) == len(lines) > 50, "a line of a table is no row: | behaviour | `tests/...::test_...` |"


@pytest.mark.parametrize(("behaviour", "tests"), ROWS, ids=[behaviour for behaviour, _ in ROWS])
def test_each_row_names_tests_that_are_run(behaviour: str, tests: str) -> None:
    named = re.findall(r"`([^`]+)`", tests)
    assert named, "no test proves it"
    assert re.fullmatch(r"(`[^`]+` )+", tests), f"more than tests: {tests}"
    in_ci = 0
    for each in named:
        path, _, name = each.partition("::")
        assert re.fullmatch(r"tests/(\w+(?:/\w+)*/test_\w+\.py|native/\w+\.cpp)", path), f"{each} is no test"
        assert (ROOT / path).exists(), f"there is no {path}"
        if path.endswith(".cpp"):
            assert f'"{name}"' in (ROOT / path).read_text(), f"{path} has no test of this text: {name}"
            in_ci += 1
        else:
            assert name in functions_of(path), f"{path} has no {name}"
            in_ci += not functions_of(path)[name] & BY_HAND
    assert in_ci, f"CI runs none of them: {tests}"


@pytest.mark.parametrize(
    "module", [kvstore_hvd.mxnet, kvstore_hvd.join, kvstore_hvd.elastic], ids=lambda module: module.__name__
)
def test_every_public_name_is_in_a_row(module: object) -> None:
    words = {word for behaviour, _ in ROWS for code in re.findall(r"`([^`]*)`", behaviour) for word in code_words(code)}
    missing = sorted(set(module.__all__) - words)  # type: ignore[attr-defined]
    assert not missing, f"docs/contract.md has no row with {', '.join(missing)}"


def code_words(code: str) -> list[str]:
    return re.findall(r"\w+", code)


def table(first: str) -> list[list[str]]:
    """The rows of the table of what is run whose head begins with `first`; its head is the first of them."""
    lines = WHAT_IS_RUN[WHAT_IS_RUN.index(f"| {first}") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def plan_of(options: Namespace) -> Plan:
    return {tuple(each) for each in suite.plan(options)}


@pytest.mark.parametrize(("column", "options"), [("make test", []), ("make test TESTS=--quick", ["--quick"])])
def test_the_suite_runs_what_the_page_says(column: str, options: list[str]) -> None:
    head, *rows = table("Tests")
    promised: Plan = set()
    for row in rows:
        folder, launcher, says = row[0], row[1], row[head.index(column)]
        if "marked" in folder:
            names = set(re.findall(r"\w+", folder)) - {"marked", "or"}
            assert names
            excluded = [f"not {name}" in suite.selection(suite.parse(options)) for name in names]
            assert excluded == [says == "no"] * len(excluded), f"{folder}: {says}"
        elif folder == "parallel":
            promised |= {(folder, launcher, int(number)) for number in re.findall(r"\d+", says)}
        else:
            lanes = suite.parse(options).lanes if folder == "integration" else 1
            assert launcher == ("pytest" if lanes == 1 else f"pytest, {lanes} at a time")
            promised.add((folder, None, 1))
    assert plan_of(suite.parse(options)) == promised


def test_the_makefile_runs_the_suite() -> None:
    recipe = re.search(r"^test: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert re.fullmatch(r"\t\$\(BIN\)/python tests/run\.py --out \S+ \$\(TESTS\)\n", recipe[1])


def test_nobody_else_says_how_many_workers_there_are() -> None:
    for page in ("README.md", "Makefile"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if "make test " in line]
        assert lines
        assert not [line for line in lines if re.search(r"\d (ranks|workers)", line)], (
            f"{page}: leave that to {PAGE.name}"
        )


def test_ci_runs_what_the_page_says(tmp_path: Path) -> None:
    """With a `make` that only writes down what it is asked for."""
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", script)
    programs = tmp_path / "programs"
    programs.mkdir()
    # Chains of calls run beside each other: each is written down in one piece. What the script would install, were it
    # missing, is not needed here.
    for name, text in {
        "make": f'echo "$(printf \'%q \' "$@")" >>{tmp_path}/calls',
        "apt-get": ":",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (programs / "sudo").symlink_to(shutil.which("true") or "/bin/true")
    done = subprocess.run(
        ["bash", str(script), "all"],
        env={"PATH": f"{programs}:/usr/bin:/bin", "PYTHON": shutil.which("python3") or "python3"},
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 0, done.stderr
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]

    run: dict[str, Plan] = {}
    targets = set()
    for call in calls:
        settings = {**DEFAULT_ENVIRONMENT, **dict(each.split("=", 1) for each in call if "=" in each)}
        targets |= {each for each in call if re.fullmatch(r"[a-z-]+", each) and not each.startswith("-")}
        if "test" in call:
            options = suite.parse(shlex.split(settings.get("TESTS", "")))
            environment = f"MXNet {settings['MXNET']}, {MPI_NAMES[settings['MPI']]}"
            key = f"{environment}: make test{' TESTS=--quick' if options.quick else ''}"
            run.setdefault(key, set()).update(plan_of(options))
    _, *rows = table("CI")
    whole = {"make test": plan_of(suite.parse([])), "make test TESTS=--quick": plan_of(suite.parse(["--quick"]))}
    assert run == {f"{what}: {command}": whole[command] for what, command in rows if what.startswith("MXNet")}
    of_cpp = next(command for what, command in rows if what == "C++")
    assert targets - {"test", "venv", "lint"} == set(re.findall(r"make ([\w-]+)", of_cpp))
