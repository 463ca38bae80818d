"""What users feel of the types: checkers pass a right program, and find every mistake of a wrong one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).resolve().parents[2] / "typing"

pytest.importorskip("basedpyright", reason="the checkers are in the environment of `make test` only")

pytestmark = pytest.mark.slow  # make lint has mypy; the other environment has the same types


def mypy(program: Path) -> set[int]:
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--no-error-summary", program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=110, check=False)
    assert not done.stderr, done.stderr
    return {int(line) for line in re.findall(rf"^{program.name}:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(program: Path) -> set[int]:
    settings = {"typeCheckingMode": "standard", "reportMissingImports": False, "reportMissingModuleSource": False}
    program.with_name("pyrightconfig.json").write_text(json.dumps(settings))
    tool = Path(sys.executable).with_name("basedpyright")  # pyright, with what it needs, from PyPI
    command = [str(tool), "--outputjson", "--pythonpath", sys.executable, program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=110, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("name", ["user_program.py", "user_errors.py"])
def test_checkers_find_the_mistakes_and_nothing_else(tmp_path: Path, name: str, checker: object) -> None:
    program = Path(shutil.copy(PROGRAMS / name, tmp_path))
    lines = program.read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if "# ERROR" in line}
    assert (len(mistakes) > 10) == (name == "user_errors.py")
    assert callable(checker)
    assert checker(program) == mistakes
