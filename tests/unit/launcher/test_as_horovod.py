"""``kvhvdrun --as-horovod``: which commands it changes, and how."""

from __future__ import annotations

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launcher.as_horovod import through_this_package


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("python train.py", "python -m kvstore_hvd train.py"),
        ("/opt/bin/python3.11 -u train.py -m x", "/opt/bin/python3.11 -u -m kvstore_hvd train.py -m x"),
        ("python3 -m pkg.train --lr 1", "python3 -m kvstore_hvd -m pkg.train --lr 1"),
        ("python3 -mpkg.train --lr 1", "python3 -m kvstore_hvd -m pkg.train --lr 1"),
        ("python -uWignore -Xdev train.py -c", "python -uWignore -Xdev -m kvstore_hvd train.py -c"),
        ("python --check-hash-based-pycs never t.py", "python --check-hash-based-pycs never -m kvstore_hvd t.py"),
        ("python -m kvstore_hvd train.py", "python -m kvstore_hvd train.py"),
    ],
)
def test_python_commands(command: str, changed: str) -> None:
    assert through_this_package(command.split()) == changed.split()


@pytest.mark.parametrize(
    "command",
    ["python", "python -", "python -uc x", "python -m", "python -W"],
)
def test_without_a_program(command: str) -> None:
    with pytest.raises(LaunchError, match=r"needs a script or a module.*\n  Fix: kvhvdrun -np N --as-horovod python"):
        through_this_package(command.split())


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("train.py --lr 1", "kvhvdrun -np N --as-horovod python train.py --lr 1"),
        ("env A=1 python train.py", "write python -m kvstore_hvd where the command runs python"),
    ],
)
def test_other_commands_are_refused_with_the_fix(command: str, fix: str) -> None:
    with pytest.raises(LaunchError) as caught:
        through_this_package(command.split())
    assert f"the command begins with '{command.split(maxsplit=1)[0]}'" in str(caught.value)
    assert fix in str(caught.value)
