"""The pages: links lead somewhere, and tables of names have all names."""

import argparse
import importlib
import re
from pathlib import Path

from kvstore_hvd import config, errors
from kvstore_hvd.horovod import variables as horovod_variables
from kvstore_hvd.launch.command import _parser
from kvstore_hvd.launch.phases import OF_GENERATION, OF_WORKER
from kvstore_hvd.mxnet_compat import numpy_shim

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
PAGES_OF_NAMES = ("errors", "architecture", "migrating-from-horovod", "numpy-shim")


def anchors(page):
    """What GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_to_every_page():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            found = "://" in target or (file.exists() and (not anchor or anchor in anchors(file)))
            assert found, f"{page.name} links to {target}"
    linked = re.findall(r"\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text())
    from_elsewhere = {"index.md", "changelog.md", "contributing.md", "benchmarks.md"}  # see docs/conf.py
    assert {page.name for page in ROOT.glob("docs/*.md")} - from_elsewhere == set(linked)


def test_the_page_has_the_tables_of_phases():
    section = (ROOT / "docs/architecture.md").read_text().partition("## Phases of a job")[2].partition("## ")[0]
    rows = re.findall(r"^\| ([\w, ]+) \| ([\w, ]+) \| (\w+) \|$", section, re.MULTILINE)
    expected = [tuple(each.replace(" ", ", ") for each in row) for row in (*OF_WORKER, *OF_GENERATION)]
    assert [row for row in rows if row[0] != "Event"] == expected


def test_the_reference_has_the_public_names():
    documented, public = [], {}
    for page in ROOT.glob("docs/api/*.rst"):
        text = page.read_text()
        (name,) = re.findall(r"^.. (?:currentmodule|automodule):: (\S+)", text, re.MULTILINE)
        module = importlib.import_module(name)
        names = re.findall(r"^.. auto(?:class|function|data):: (\w+)", text, re.MULTILINE)
        documented += [(name, each) for each in (names or module.__all__)]
        public |= {(name, each): getattr(module, each) for each in module.__all__}
    assert len(documented) == len(set(documented)) and set(documented) <= public.keys()
    objects = {id(public[each]) for each in documented}
    missing = [each for each, value in public.items() if id(value) not in objects]
    assert not missing, f"docs/api does not have {missing}"


def test_every_name_is_on_its_page():
    texts, architecture, migrating, shim = ((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES_OF_NAMES)
    comments = re.findall(r"    # (.+)\n    (\w+): .* = _knob\(", (ROOT / "kvstore_hvd" / "config.py").read_text())
    descriptions = {name: text for text, name in comments} | config.HELP
    assert descriptions.keys() == config.KNOBS.keys()
    defaults = {n: "" if k.default in (None, (), b"") else config._shown(k.default) for n, k in config.KNOBS.items()}
    knobs = ((" or ".join(f"`{v}`" for v in k.variables), n) for n, k in config.KNOBS.items())
    missing = [row for names, n in knobs if (row := f"| {names} | {defaults[n]} | {descriptions[n]}") not in texts]
    kinds = [name for name in errors.__all__ if isinstance(getattr(errors, name), type) and name != "KVHvdError"]
    missing += [name for name in (*kinds, *config.known_variables()) if f"`{name}`" not in texts]
    missing += [name for name in (*numpy_shim._NAMES, *numpy_shim._FINANCIAL) if f"`{name}`" not in shim]
    parts = [path.name + ("/" if path.is_dir() else "") for path in (ROOT / "kvstore_hvd").iterdir()]
    parts = [part for part in parts if part.endswith((".py", "/")) and part not in ("__init__.py", "__pycache__/")]
    missing += [part for part in parts if not re.search(rf"(?<![\w/]){re.escape(part)}", architecture)]
    names = [name for name in config.known_variables() if name.startswith("HOROVOD_")]
    names += [*horovod_variables._REASONS, *(prefix.rstrip("_") for prefix in horovod_variables._PREFIXES)]
    missing += [name for name in names if f"`{name}" not in migrating]
    shown = [action for action in _parser()._actions if action.help != argparse.SUPPRESS]
    options = [action.option_strings[-1] for action in shown if action.option_strings]
    missing += [each for each in options if each not in migrating and each not in ("--help", "-n")]
    assert not missing, f"docs/{', '.join(PAGES_OF_NAMES)} do not name {missing}"
