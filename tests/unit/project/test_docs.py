"""The pages: links lead somewhere, and tables of names have all names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvstore_hvd import config, launch
from kvstore_hvd.horovod import variables as horovod_variables

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
MIGRATING = ROOT / "docs" / "migrating-from-horovod.md"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}: no such file"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_digests_are_no_promise(page: Path) -> None:
    """MXNet's kernels round otherwise on another processor: a page that shows a digest of parameters says so."""
    text = page.read_text()
    assert not re.search(r"sha256 [0-9a-f]{8,}", text) or ("depends on" in text and "on the processor" in text)


def test_every_page_is_linked_from_the_readme() -> None:
    linked = re.findall(r"\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text())
    assert {page.name for page in ROOT.glob("docs/*.md")} <= set(linked)


def test_every_variable_is_on_the_page_about_settings() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = [each.metadata for each in dataclasses.fields(config.Config) if each.metadata]
    missing = [
        each["variables"] for each in rows if f"| {' or '.join(f'`{v}`' for v in each['variables'])} |" not in text
    ]
    assert not missing, f"docs/errors.md does not name {missing}"
    assert all(each["doc"] in text for each in rows)


def test_every_part_of_the_package_is_on_the_page_about_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    parts = [path.name + ("/" if path.is_dir() else "") for path in (ROOT / "kvstore_hvd").iterdir()]
    parts = [part for part in parts if part.endswith((".py", "/")) and part not in ("__init__.py", "__pycache__/")]
    missing = sorted(part for part in parts if not re.search(rf"(?<![\w/]){re.escape(part)}", text))
    assert not missing, f"docs/architecture.md does not name {', '.join(missing)}"


def test_horovods_variables_are_on_the_page_about_migrating() -> None:
    text = MIGRATING.read_text()
    read = [name for name in config.known_variables() if name.startswith("HOROVOD_")]
    prefixes = [prefix.rstrip("_") for prefix in horovod_variables._PREFIXES]
    missing = [name for name in (*read, *horovod_variables._REASONS, *prefixes) if f"`{name}" not in text]
    assert not missing, f"{MIGRATING.name} does not name {', '.join(missing)}"


def test_the_launchers_options_are_on_the_page_about_migrating() -> None:
    text = MIGRATING.read_text()
    options = [action.option_strings[-1] for action in launch._parser()._actions if action.option_strings]
    missing = [option for option in options if option not in text and option not in ("--help", "-n")]
    assert not missing, f"{MIGRATING.name} does not name {', '.join(missing)}"
