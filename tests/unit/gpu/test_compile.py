"""The GPU kernels compile for every architecture that NVRTC knows, keep denormals, and need no memory for registers.

The oldest and the newest architecture that each compiler knows, and all kernels for the newest of all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

import pytest

from kvstore_hvd.gpu import kernels
from support.nvrtc import Compiler, libraries

LIBRARIES = libraries()
# As CuPy does, which appends it to the options of every module.
OPTIONS = ("-ftz=true",)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARIES, reason="no NVRTC is installed; pip install kvstore-hvd[test-gpu]"),
]


def cases() -> list[object]:
    """The first and the last architecture of each library."""
    found: list[object] = []
    for library in LIBRARIES:
        known = Compiler(library).architectures()
        found += [pytest.param(library, number, id=f"{library.name}-sm_{number}") for number in (known[0], known[-1])]
    return found


def compiled(library: Path, architecture: str, dtype: Optional[str], *options: str) -> tuple[str, str]:
    return Compiler(library).compile(kernels.source(), architecture, (*kernels.options(dtype), *OPTIONS, *options))


def check(library: Path, number: int, dtype: Optional[str]) -> None:
    """Compile for one architecture; no kernel may keep registers in memory, and no operation may be changed."""
    ptx, log = compiled(library, f"sm_{number}", dtype, "--ptxas-options=-v")
    functions = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill", log)
    assert {name for name, _, _ in functions} == set(kernels.kernel_names(dtype))
    spilled = [f"{name}: {frame} bytes of stack, {spill} spilled" for name, frame, spill in functions if frame != "0"]
    assert not spilled, "\n".join(spilled)

    instructions = set(re.findall(r"^\s+(?:@!?%\w+ )?([a-z]\w*(?:\.\w+(?:::\w+)?)+)", ptx, re.MULTILINE))
    assert "add.rn.f32" in instructions
    assert not {name for name in instructions if ".ftz" in name}, "denormals are flushed"
    assert not {name for name in instructions if name.startswith(("fma.", "mad.rn"))}, "operations are fused"
    # Peers write the memory while the kernel runs.
    assert not {name for name in instructions if name.startswith("ld.global.nc")}, "loads are taken for constant"


@pytest.mark.parametrize(("library", "number"), cases())
def test_one_type_compiles(library: Path, number: int) -> None:
    check(library, number, "float32")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", LIBRARIES[-1:], ids=lambda library: library.name)
def test_all_kernels_compile(library: Path) -> None:
    check(library, Compiler(library).architectures()[-1], None)
