"""The tutorial: its script grows by the page's diffs, and each command prints what the page says."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def grown(script, diff):
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        old, new = ("".join(re.findall(f"^[ {sign}](.*\n)", hunk, re.MULTILINE)) for sign in "-+")
        assert script.count(old) == 1, f"not once in the script:\n{old}"
        script = script.replace(old, new)
    return script


def plain(line):
    """Without what differs from run to run."""
    return re.sub(r"(pid|at epoch|step) \d+|(accuracy) .*", r"\1\2", line)


def test_each_step_of_the_tutorial(start, tmp_path):
    script = ""
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind:
            script = grown(script, text) if kind == "diff" else text
            (tmp_path / "train.py").write_text(script)
            continue
        command, *shown = text.removeprefix("$ ").splitlines()
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        variables = dict(word.split("=") for word in words if re.match(r"[A-Z_]+=", word))
        launcher, *words = words[len(variables) :]
        job = start("", words, launcher=() if launcher == "kvhvdrun" else [launcher], **variables)
        code = 0
        if "was killed by SIGKILL" in text:
            job.until_printed("epoch 2")
            os.kill(int(re.findall(r"pid (\d+) is rank 1", job.out)[0]), signal.SIGKILL)
        elif "--checkpoint-every" in words:  # Ctrl-C
            job.until_printed("epoch 2").process.send_signal(signal.SIGINT)
            code = 128 + signal.SIGINT
        job.end(code)
        printed = [plain(line) for line in (job.out + job.err).splitlines()]
        missing = [line for line in shown if line != "..." and plain(line) not in printed]
        assert not missing, f"{missing}\n{job.describe()}"
        assert float(re.findall(r"accuracy ([\d.]+) %", job.out)[-1]) > 95, job.describe()
