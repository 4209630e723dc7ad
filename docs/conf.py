"""Sphinx's settings for the site that `scripts/docs` builds from the pages.

The pages stay plain Markdown that reads well on GitHub. While Sphinx reads them, this module adds the rest: the tables
of contents, from the links in `index.md` and `api/index.md`, and for each linked file of the repository a page that
shows the file.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

ROOT = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", "": "bash"}
"""The language of a linked file, by its suffix."""

project = "trainer"
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
nitpicky = True

html_theme = "furo"
html_title = "trainer"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def setup(app: Sphinx) -> None:
    """Connect the functions below to Sphinx's events. Sphinx calls this."""
    shown: set[str] = set()
    app.connect("source-read", lambda _, page, text: text.__setitem__(0, _for_the_site(page, text[0], shown)))
    app.connect("html-collect-pages", lambda _: _files(shown))


def _for_the_site(page: str, text: str, shown: set[str]) -> str:
    """Return a page with tables of contents if it is an index, and with links to the pages of files.

    Adds the paths of these files to ``shown``.
    """

    def to_its_page(link: re.Match[str]) -> str:
        path = normpath(join(dirname(page), link[1]))
        if Path(path).suffix not in LANGUAGES or not (ROOT / path).is_file():
            return link[0]
        shown.add(path)
        return f"]({relpath(f'files/{path}.html', dirname(page) or '.')}{link[2] or ''}){{.external}}"

    contents = _contents(text) if page.endswith("/index") else []
    return "\n\n".join([_LINK.sub(to_its_page, text), *contents])


def _contents(text: str) -> Iterator[str]:
    """Yield a table of contents for each heading: the pages that its section links to, titled as the links are."""
    for section in text.split("\n## ")[1:]:
        caption = section.partition("\n")[0]
        pages: dict[str, str] = {}
        for title, page, part in re.findall(r"\[([^\]]*)\]\(([^)#]+\.md)(#?)", section):
            pages.setdefault(page, page if part else f"{title} <{page}>")
        yield "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages.values(), "```"])


def _files(shown: set[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages that show files. In their links, the anchor of a function or a class is its name."""
    bridge = PygmentsBridge("html", pygments_style)
    for path in sorted(shown):
        text = (ROOT / path).read_text(encoding="utf-8")
        code = bridge.highlight_block(text, LANGUAGES[Path(path).suffix], linenos="inline")
        code = re.sub(r'<span class="(nf|nc)">(\w+)</span>', r'<span class="\1" id="\2">\2</span>', code)
        yield f"files/{path}", {"title": path, "body": f"<h1>{html.escape(path)}</h1>\n{code}"}, "page.html"
