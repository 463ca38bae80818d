"""The programs in the pages print what the pages say they print."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(version("mxnet") >= "2", reason="the pages' programs are for MXNet 1"),
]


def example(page):
    """The first program of a page, the command that comes after it, and what that prints."""
    text = (ROOT / page).read_text()
    found = re.search(r"^```python\n(.*?)^```$.*?^```\n\$ (.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page} has no program with a command after it"
    return found[1], found[2], found[3].splitlines()


def plain(line):
    """A line without what differs from run to run: hosts, processes, folders, order, last digits of a loss."""
    line = re.sub(r"\([\w.-]+, pid \d+\)", "(host, pid)", line)
    line = re.sub(r'File ".*?/?(\w+\.py)"', r'File "\1"', line)
    line = re.sub(r"checkpoint \S+|(?<= on stderr)( are above\.|:)$", "checkpoint", line)
    line = re.sub(r"First, worker \d+ \(localhost:\d+\)", "First, worker", line)
    line = re.sub(r"(pid|from step) \d+|'\w+' \(key \d\)", r"\1", line)
    return re.sub(r"loss [\d.]+e-\d+", "loss", line)


# `.ci/run wheel` runs the program of the README, too.
@pytest.mark.parametrize(
    "page",
    [
        "docs/unchanged-scripts.md",
        *(pytest.param(page, marks=pytest.mark.slow) for page in ("README.md", "docs/diagnosing-hangs.md")),
    ],
)
def test_a_program_prints_what_the_page_says(page, run, tmp_path):
    program, command, shown = example(page)
    (tmp_path / "train.py").write_text(program)
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words[: words.index("kvhvdrun")])
    arguments = [sys.executable if word == "python" else word for word in words[words.index("kvhvdrun") + 1 :]]
    job = run("", arguments, code=None, **variables)
    printed = [plain(line) for line in (job.out + job.err).splitlines()]
    for rank in ("[0]", "[1]"):
        lines = iter(printed)
        for line in shown:
            if line.startswith(rank):
                assert plain(line) in lines, f"not printed, or out of order: {line}\n{job.describe()}"


@pytest.mark.slow
def test_the_faults_look_as_their_page_says(start, tmp_path):
    """Its programs are called by the names above them, and its commands run one after the other."""
    text = (ROOT / "docs" / "faults.md").read_text()
    for name, program in re.findall(r"^`(\w+\.py)`.*?^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(program)
    commands = re.findall(
        r"^```\n\$ ((?:\w+=\S+ )?)kvhvdrun (.*?) python (.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert len(commands) == 6
    for setting, options, arguments, shown in commands:
        variables = dict(word.split("=") for word in setting.split())
        job = start(options, [sys.executable, *arguments.split()], **variables).end(None)
        printed = [plain(line) for line in (job.out + job.err).splitlines()]
        missing = [line for line in shown.splitlines() if line != "..." and plain(line) not in printed]
        assert not missing, f"{missing}\n{job.describe()}"


@pytest.mark.slow
def test_the_notebook_prints_what_its_page_says(start):
    """Read from standard input: like the cells of a notebook, it has no file."""
    text = (ROOT / "docs" / "notebooks.md").read_text()
    program, shown = re.findall(r"^```(?:python)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:2]
    job = start("-", [], launcher=[sys.executable], stdin=subprocess.PIPE)
    job.process.communicate(program.encode())
    assert sorted(job.end().out.splitlines()) == sorted(shown.splitlines())
