"""Writes docs/api.md, the reference of all public names, from their docstrings: ``python docs/make_api.py``.

Which names are public a module's ``__all__`` says. Signatures and docstrings are read from the sources by griffe, not
from imported objects, so that the page does not depend on the version of Python or of MXNet.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import itertools
import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from kvstore_hvd import __main__ as runner
from kvstore_hvd import launch

PAGE = Path(__file__).with_name("api.md")

INTRODUCTION = """\
# API

Made from the docstrings by `make api`; a test compares. Exceptions are explained in [errors and settings](errors.md),
which also has every environment variable.
"""

# Module -> what its names begin with here, and what to say before them.
MODULES = {
    "kvstore_hvd": (
        "kvstore_hvd.",
        "The store, collectives on NumPy arrays, and the world of workers. `import kvstore_hvd` registers the store:"
        " `mx.kv.create('horovod')` makes a `Horovod`.",
    ),
    "kvstore_hvd.mxnet": ("hvd.", "The API of `horovod.mxnet`: `import kvstore_hvd.mxnet as hvd`."),
    "kvstore_hvd.elastic": (
        "elastic.",
        "Training that goes on when workers are lost, come, or go; with Horovod's names, and also as"
        " `kvstore_hvd.mxnet.elastic`: `from kvstore_hvd import elastic`.",
    ),
    "kvstore_hvd.join": ("", "Uneven inputs, with the semantics of PyTorch's `Join`."),
    "kvstore_hvd.timeline": ("", "See [timeline](timeline.md)."),
    "kvstore_hvd.errors": ("", "All of them are names of `kvstore_hvd`, too."),
}

# Classes that programs do not call.
MADE_BY_MXNET = ("StoreMethods",)


def page() -> str:
    """Return the whole page."""
    reference = Reference()
    parts = [INTRODUCTION]
    parts += [f"- [`{name}`](#{_anchor(name)})" for name in MODULES]
    parts += ["- [Command lines](#command-lines)", ""]
    for name, (prefix, text) in MODULES.items():
        parts += [f"## {name}", "", *_wrap(text), "", *reference.module(name, prefix)]
    parts += command_lines()
    return "\n".join(parts).rstrip() + "\n"


class Reference:
    """The entries of modules' public names; each is written once, in the module that defines it."""

    def __init__(self) -> None:
        self._sources: dict[str, Any] = {}

    def module(self, name: str, prefix: str) -> Iterator[str]:
        """Yield the lines of a module's names."""
        module = importlib.import_module(name)
        elsewhere: dict[str, list[str]] = {}
        for public in sorted(module.__all__, key=lambda each: (each.lower(), each)):
            value = getattr(module, public)
            if isinstance(value, enum.Enum):
                elsewhere.setdefault(f"Members of `{type(value).__name__}`", []).append(public)
                continue
            definition = self._definition(name, public, value)
            if name == "kvstore_hvd.errors" and not definition.is_class:
                continue  # helpers
            home = max((each for each in MODULES if definition.path.startswith(f"{each}.")), key=len)
            if home == name:
                yield from entry(definition, prefix + public)
            else:
                elsewhere.setdefault(f"Of [`{home}`](#{_anchor(home)})", []).append(public)
        for what, names in elsewhere.items():
            yield from (*_wrap(f"{what}: {', '.join(f'`{each}`' for each in names)}."), "")

    def _definition(self, module: str, public: str, value: Any) -> Any:
        """Where a name is defined: a class that is made at run time (it derives from MXNet's) has a base for that."""
        if inspect.isclass(value):
            found = (self._at(base.__module__, base.__qualname__) for base in value.__mro__)
            # What derives from Any stands for it where only type checkers look.
            return next(each for each in found if each and "Any" not in map(str, each.bases))
        if inspect.isroutine(value):
            return self._at(value.__module__, value.__qualname__)
        return self._imported(module, public)

    def _imported(self, module: str, name: str) -> Any:
        found = self._at(module, name)
        if found is not None:
            return self._imported(*found.target_path.rsplit(".", 1)) if found.is_alias else found
        sources = (each.wildcard for each in self._sources[module].members.values() if each.is_alias and each.wildcard)
        return next(value for value in (self._imported(source, name) for source in sources) if value is not None)

    def _at(self, module: str, name: str) -> Any:
        # Module by module: in a package that is loaded as a whole, a module hides a function of its name.
        if not module.startswith("kvstore_hvd"):
            return None
        if module not in self._sources:
            path = Path(importlib.import_module(module).__file__ or "")
            self._sources[module] = griffe.visit(module, filepath=path, code=path.read_text())
        try:
            return self._sources[module].get_member(name)
        except KeyError:
            return None


def entry(definition: Any, name: str, level: int = 3) -> Iterator[str]:
    """Yield the lines of a function, a class with its methods, or an attribute."""
    yield from (f"{'#' * level} {name}", "")
    if definition.is_class:
        constructor = definition.members.get("__init__")
        if definition.name in MADE_BY_MXNET:
            pass
        elif constructor is not None:
            yield from signature(constructor, name)
        elif definition.bases:
            yield from (f"Is a {', '.join(f'`{base}`' for base in definition.bases)}.", "")
        yield from docstring(definition)
        for member_name, member in definition.members.items():
            if not member_name.startswith("_") and (member.is_function or member.docstring):
                yield from entry(member, f"{name}.{member_name}", level + 1)
        is_dataclass = "dataclass" in definition.labels
        values = [
            each
            for each, member in definition.members.items()
            if _is_value(each, member) and (is_dataclass or member.value is not None)
        ]
        if values:
            yield from (f"Attributes: {', '.join(f'`{each}`' for each in values)}.", "")
    elif definition.is_function:
        yield from signature(definition, name)
        yield from docstring(definition)
    elif "property" in definition.labels:
        yield from (f"*Property*, `{definition.annotation}`", "")
        yield from docstring(definition)
    else:
        lines = definition.parent.filepath.read_text().splitlines()[: definition.lineno - 1]
        if lines[-1].startswith("#:"):
            yield from (lines[-1][2:].strip(), "")


def _is_value(name: str, member: Any) -> bool:
    return member.is_attribute and not name.startswith("_") and not member.docstring and "property" not in member.labels


def signature(function: Any, name: str) -> Iterator[str]:
    """Yield a block with the call, one line if it fits."""
    parameters = []
    kind = None
    for parameter in function.parameters:
        if parameter.name in ("self", "cls") and kind is None:
            continue
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        if parameter.kind.value == "keyword-only" and kind not in ("keyword-only", "variadic positional"):
            parameters.append("*")
        kind = parameter.kind.value
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        parameters.append(text)
    result = "" if name.rpartition(".")[2][:1].isupper() or function.returns is None else f" -> {function.returns}"
    call = f"{name}({', '.join(parameters)}){result}"
    yield "```python"
    if len(call) <= 100:
        yield call
    else:
        yield f"{name}("
        yield from (f"    {each}," for each in parameters)
        yield f"){result}"
    yield from ("```", "")


def docstring(definition: Any) -> Iterator[str]:
    """Yield a docstring of NumPy's form as Markdown."""
    if definition.docstring is None:
        return
    for section in definition.docstring.parse("numpy", warnings=False):
        kind = section.kind.value
        if kind == "text":
            yield from (*_prose(section.value), "")
        elif kind == "admonition":  # Notes, See Also and so on
            yield from (f"*{section.title}*", "", *_prose(section.value.description), "")
        elif kind == "examples":
            for part, text in section.value:
                yield from ("```python", text, "```", "") if part.value == "examples" else (text, "")
        else:
            yield from (f"*{'Parameters' if kind == 'other parameters' else kind.capitalize()}*", "")
            # Parameters that share a description are items of their own here.
            for description, group in itertools.groupby(section.value, lambda item: item.description):
                items = list(group)
                names = ", ".join(f"`{item.name}`" for item in items if getattr(item, "name", ""))
                types = _types(items[0].annotation, definition)
                yield from _item(" ".join(each for each in (names, types) if each), description)
            yield ""


def _types(annotation: Any, definition: Any) -> str:
    """Types as the docstring has them; nothing when they were taken from the signature, which is shown anyway."""
    of_signature = getattr(definition, "parameters", [])
    if annotation is None or any(annotation is parameter.annotation for parameter in of_signature):
        return ""
    if isinstance(annotation, str):
        return f"`{annotation}`"
    elements = getattr(annotation, "elements", None) or [annotation]
    return ", ".join(f"`{each}`" for each in elements)


def _prose(text: str) -> Iterator[str]:
    """Yield text whose blocks after ``::`` become blocks of code."""
    lines = text.splitlines()
    block = False
    for place, line in enumerate(lines):
        if block and line and not line.startswith(" "):
            yield from ("```", "")
            block = False
        if line.endswith("::") and any(lines[place + 1 :]):
            yield from (line[:-1], "", "```python")
            block = True
        elif not (block and not line and lines[place - 1].endswith("::")):
            yield line[4:] if block else line
    if block:
        yield "```"


def _item(head: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    yield f"- {head}" + (f": {lines[0]}" if lines else "")
    yield from textwrap.indent("\n".join(lines[1:]), "  ").splitlines()


def command_lines() -> Iterator[str]:
    """Yield the options of the package's programs."""
    parser = launch._parser()
    yield from ("## Command lines", "", "### kvhvdrun", "", "```", parser.usage, "```", "", parser.description, "")
    yield from ("| Option | Meaning |", "|---|---|")
    for action in parser._actions:
        if action.option_strings:
            metavar = action.metavar
            value = f" {' '.join(metavar) if isinstance(metavar, tuple) else metavar}" if metavar else ""
            yield f"| {', '.join(f'`{each}{value}`' for each in action.option_strings)} | {action.help} |"
    yield from ("", "### python -m kvstore_hvd", "", "```", *runner._USAGE.splitlines(), "```", "")
    yield from ("### python -m kvstore_hvd.timeline", "", "```", "python -m kvstore_hvd.timeline merge FILE", "```", "")
    yield "Makes the timeline of a job that was killed, of what its workers left beside FILE."


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "").replace(" ", "-")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page, or with ``--check`` say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    options = parser.parse_args()
    logging.getLogger("griffe").setLevel(logging.ERROR)
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise SystemExit("docs/api.md is not what the docstrings say: run `make api`.")


if __name__ == "__main__":
    main()
