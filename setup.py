"""Builds the native extension; everything that is only data stands in setup.cfg and pyproject.toml.

``KVHVD_BUILD_JOBS`` limits the number of compilers that run at once (default: one per core).
"""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("native").rglob("*.cpp"))
# Translation units: a folder each, as most of the time goes into headers (all 65 files: 106 s of CPU time; the units:
# 46 s). Kernels stay single for their flags, algorithms because all have the same local names.
UNITS = Path("build", "units")
HEADERS = sorted(str(path) for path in Path("native").rglob("*.hpp"))
# -MMD: which headers a source includes, see _is_outdated.
# -ffp-contract=off: a fused multiply-add would round differently from kernel to kernel, and so from rank to rank.
# KVHVD_OPTIMIZATION=-O1: planted faults (tests/faults) are compiled in half the time.
OPTIMIZATION = os.environ.get("KVHVD_OPTIMIZATION", "-O3")
# -fno-math-errno, -fno-trapping-math: loops with square roots and comparisons become vectors, of the same bits.
FLAGS = [OPTIMIZATION, "-MMD", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# Instruction sets that only these files may use; the CPU is asked at run time. Elsewhere they compile to nothing.
X86_64_FLAGS = {
    "reduce_avx2.cpp": ["-mavx2", "-mf16c"],
    "reduce_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
# Bindings only translate types: an allreduce of 4 bytes and a loop of `pushpull` are as fast as with -O3.
UNIT_FLAGS = {"bindings.cpp": ["-O1"]}


class BuildExt(build_ext):
    """Adds the flags of single sources, and compiles only what is older than its source or a header of it."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile and link ``ext``."""
        if not SOURCES:
            raise RuntimeError("there is no native/**/*.cpp to build the extension from; is this a whole checkout?")
        ext.sources = _units()
        for obj in Path(self.build_temp).rglob("*.o"):  # the C++ tests link all of them
            if str(obj.relative_to(self.build_temp).with_suffix(".cpp")) not in ext.sources:
                obj.unlink()
        compile_one = self.compiler._compile
        extra = {**UNIT_FLAGS, **(X86_64_FLAGS if self.plat_name.endswith("x86_64") else {})}

        def compile_with_extra(obj, src, suffix, cc_args, postargs, pp_opts):  # type: ignore[no-untyped-def]
            compile_one(obj, src, suffix, cc_args, [*postargs, *extra.get(Path(src).name, [])], pp_opts)

        self.compiler._compile = compile_with_extra
        try:
            with ParallelCompile("KVHVD_BUILD_JOBS", needs_recompile=_is_outdated):
                super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


def _units() -> list[str]:
    """Write the units that include a folder's sources; all units, those that take longest first."""
    UNITS.mkdir(parents=True, exist_ok=True)
    folders: dict[str, list[str]] = {}
    for source in SOURCES:
        folders.setdefault(Path(source).parent.name, []).append(source)
    single = folders.pop("reduce") + folders.pop("algorithms")
    units = {name: UNITS / f"{name}.cpp" for name in sorted(folders)}
    for name, unit in units.items():
        text = "".join(f'#include "{Path(source).relative_to("native")}"\n' for source in folders[name])
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
    return [str(units.pop("bindings")), *single, *map(str, units.values())]


def _is_outdated(obj: str, src: str) -> bool:
    try:
        rule = Path(obj).with_suffix(".d").read_text()  # "obj: src header header ...", written by the compiler
        # Those of others have absolute paths, some in an environment that pip has made for one build.
        own = [path for path in rule.replace("\\\n", " ").partition(":")[2].split() if not os.path.isabs(path)]
        return any(os.path.getmtime(path) > os.path.getmtime(obj) for path in (*own, "setup.py"))
    except FileNotFoundError:  # never compiled, or a header is gone
        return True


def _readme() -> str:
    """The README with links that lead somewhere on a package index, too."""
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    files = settings["metadata"]["url"]
    text = re.sub(r"(!\[[^]]*\]\()", rf"\g<1>{files}/raw/main/", Path("README.md").read_text())
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{files}/blob/main/", text)


setup(
    long_description=_readme(),
    # KVHVD_BUILD_NATIVE=0: an editable installation beside a `build_ext --inplace`, see the Makefile.
    ext_modules=[]
    if os.environ.get("KVHVD_BUILD_NATIVE") == "0"
    else [
        Pybind11Extension(
            "kvstore_hvd._native",
            sources=SOURCES,
            depends=[*SOURCES, *HEADERS, "setup.py"],
            include_dirs=["native"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            libraries=["dl"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
