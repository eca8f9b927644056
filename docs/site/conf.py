"""How `make docs` turns the pages of docs/ into a site.

The pages are written for the repository, and appear here as they stand. docs/index.md is the navigation: each page in
its lists "The path", "Guides" and "Reference" is an entry. A link to a file outside docs/ leads to a page with that
file's text. The build needs no network, and the pages load nothing from elsewhere. Any warning fails it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import find_lexer_class_for_filename
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

project = "slime"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
html_theme = "furo"
html_title = "slime"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes = False  # it would turn the two hyphens of a flag into a dash
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # excerpts with an ellipsis are no valid JSON
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "repository"]
copybutton_exclude = ".linenos, .gp"

SECTIONS = ("The path", "Guides", "Reference")
"""Sections of docs/index.md whose lists are the navigation."""
TITLES = {"fails": "refused, as it should be", "setup": "once"}
"""Titles of blocks of code that mean something to the tests -> what a reader sees."""


def outside(page: str) -> re.Pattern[str]:
    """Matches a link to a file outside docs/, in a page named by its path below docs/."""
    up = r"\.\./" * (page.count("/") + 1)
    return re.compile(rf"\]\({up}(?!docs/|\.)([^)#]*)(?:#[^)]*)?\)")


def entries_of(section: str) -> list[tuple[str, str]]:
    """The list of a section of docs/index.md: name, and page without the suffix."""
    text = (DOCS / "index.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^(?:-|\d\.) \[([^\]]+)\]\(([^)]+)\.md\)", text, re.M)
    pages = sorted((DOCS / "path").glob("*.md")) if section == "The path" and not listed else []
    return listed or [(page.read_text().partition("\n")[0].lstrip("# "), f"path/{page.stem}") for page in pages]


def navigation() -> str:
    """The tables of contents that the theme shows beside every page."""
    tables = []
    for section in SECTIONS:
        entries = "\n".join(f"{name} <{page}>" for name, page in entries_of(section))
        tables.append(f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{entries}\n```\n" if entries else "")
    return "".join(tables)


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrites what a repository's page and the site's parser spell differently."""
    text = re.sub(
        r'^```(\w+) title="([^"]+)"$',
        lambda m: f"```{{code-block}} {m[1]}\n:caption: {TITLES.get(m[2], m[2])}\n",
        source[0],
        flags=re.M,
    )
    for target in outside(page).findall(text):
        if not (ROOT / target).exists():
            logging.getLogger(__name__).warning("there is no %s in the repository", target, location=page)
    text = outside(page).sub(r"](repository:\1)", text)
    text = re.sub(r"\[\w+\.md\]\(", "[](", text)  # the title of the page or section instead of the file's name
    source[0] = text + (navigation() if page == root_doc else "")


def lead_to_files(app: Sphinx, document: nodes.document, page: str) -> None:
    """Links to files outside docs/ end at the pages of `pages_of_files`."""
    for link in document.findall(nodes.reference):
        scheme, _, target = link.get("refuri", "").partition(":")
        if scheme == "repository":
            link["refuri"] = app.builder.get_relative_uri(page, f"repository/{target.rstrip('/')}")
            link["classes"] = []


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file outside docs/ that a page links to; for a folder, a page for each of its files."""
    texts = {page.relative_to(DOCS).as_posix(): page.read_text() for page in DOCS.rglob("*.md")}
    linked = {target.rstrip("/") for page, text in texts.items() for target in outside(page).findall(text)}
    folders = {name for name in linked if (ROOT / name).is_dir()}
    for folder in sorted(folders):
        inside = sorted(p for p in (ROOT / folder).iterdir() if p.suffix == ".py" and p.stat().st_size)
        linked |= {p.relative_to(ROOT).as_posix() for p in inside}
        items = "".join(f'<li><a href="{Path(folder).name}/{p.name}.html">{p.name}</a></li>' for p in inside)
        yield f"repository/{folder}", {"title": folder, "body": f"<h1>{folder}</h1><ul>{items}</ul>"}, "page.html"
    for name in sorted(linked - folders):
        path = ROOT / name
        lexer: type[Lexer] = find_lexer_class_for_filename(path.name) or TextLexer
        code = highlight(path.read_text(), lexer(), HtmlFormatter(cssclass="highlight"))
        yield f"repository/{name}", {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("doctree-resolved", lead_to_files)
    app.connect("html-collect-pages", pages_of_files)
