"""Sphinx: `make docs` writes the site to build/docs. Some pages are files that are kept outside of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import kvstore_hvd

ROOT = Path(__file__).parent.parent
(REPOSITORY,) = re.findall(r"^url = (\S+)", (ROOT / "setup.cfg").read_text(), re.MULTILINE)

project = "kvstore-hvd"
version = release = kvstore_hvd.__version__
project_copyright = "the kvstore-hvd authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = f"kvstore-hvd {version}"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # skipped levels of headings; JSON that is cut short

default_role = "py:obj"  # `x` in docstrings: a link where it is a name of the package
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 90

# Pages of the site, and the files that have their text.
OTHERS = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
_PAGES = {source: page for page, source in OTHERS.items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)([^)\s]*\))")


def _read(app: Any, page: str, source: list[str]) -> None:
    """Put the text of files from elsewhere before that of their pages; point links into the site or the repository."""
    file = OTHERS.get(page, f"docs/{page}.md")
    if page in OTHERS:
        source[0] = (ROOT / file).read_text() + "\n" + source[0]
    elif not (ROOT / file).exists():
        return

    def point(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), link[2]))
        if not (ROOT / path).exists() or path.startswith("docs/static/"):
            return link[0] if page != "index" else link[0].replace("](docs/", "](")
        if path in _PAGES:
            target = f"/{_PAGES[path]}.md"
        elif path.startswith("docs/"):
            target = f"/{path.removeprefix('docs/')}"
        else:
            target = f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
        return f"{link[1]}{target}{link[3]}"

    source[0] = _LINK.sub(point, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
