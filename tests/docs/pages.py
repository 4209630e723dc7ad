"""Fenced blocks of a documentation page, and their treatment.

Markers in the lines before a block, each an HTML comment:

- ``<!-- file: conf/recipe/mine.yaml -->``: the block is written to that file.
- ``<!-- output -->``: the block is the output of the previous block of commands (`tests.docs.output`).
- ``<!-- fails -->``: the last command of the block ends with an error.
- ``<!-- limits: none -->``: the commands run without the limits that make them short; or with these limits:
  ``<!-- limits: trainer.max_epochs=2 -->``. With ``<!-- limits: --cfg job -->`` they are only checked, because tests
  train the recipe.
- ``<!-- not run: the reason -->``: the block is not checked, but counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

RUN = ("bash", "python")
"""Languages of blocks that are run."""

READ = ("yaml", "toml", "json")
"""Languages of blocks that must be well formed, unless they are written to a file."""

SHOWN = ("text", "diff")
"""Languages of unchecked blocks. They are counted, except outputs."""

MARKERS = {"file": True, "output": False, "fails": False, "limits": True, "not run": True}
"""Markers, and whether they need a value."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: language of the block.
        text: content.
        line: first line, counted from 1.
        markers: values of `MARKERS`.
    """

    language: str
    text: str
    line: int
    markers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_checked(self) -> bool:
        """Return whether an error in the block fails a test."""
        if "not run" in self.markers:
            return False
        return self.language not in SHOWN or "file" in self.markers or "output" in self.markers


class PageError(AssertionError):
    """Raised if a page breaks the rules for authors."""


def read(page: Path) -> list[Block]:
    """Read the blocks of a page, in order.

    Raises:
        PageError: a block that is indented instead of fenced, or has another language than those above, or an invalid
        marker.
    """
    return blocks(page.read_text(encoding="utf-8"), page.name)


def blocks(text: str, name: str = "page") -> list[Block]:
    """Return the blocks of a page's text."""
    found = []
    comment = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            where = f"{name}:{token.map[0] + 1}"
            if token.type == "code_block":
                raise PageError(f"{where}: an indented block, which no test runs. Write it between ``` lines.")
            language = token.info.strip()
            if language not in (*RUN, *READ, *SHOWN):
                raise PageError(f"{where}: language {language!r}, expected one of {', '.join((*RUN, *READ, *SHOWN))}.")
            found.append(Block(language, token.content, token.map[0] + 1, _markers(comment, where)))
        comment = token.content if token.type == "html_block" else ""
    return found


def _markers(comment: str, where: str) -> dict[str, str]:
    """Return the markers before a block."""
    markers = {}
    for content in re.findall(r"<!--\s*(.*?)\s*-->", comment, re.DOTALL):
        word, colon, value = (part.strip() for part in content.partition(":"))
        if word not in MARKERS:
            continue
        if bool(value) != MARKERS[word] or bool(colon) != MARKERS[word]:
            raise PageError(f"{where}: got <!-- {content} -->, expected <!-- {word}{': ...' * MARKERS[word]} -->.")
        if word == "file" and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise PageError(f"{where}: file {value!r} is not in the reader's folder.")
        markers[word] = value
    return markers


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Return a page without its blocks, inline code and comments."""
    return re.sub(r"<!--.*?-->|`[^`\n]*`", "", without_blocks(text), flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def links(text: str) -> list[str]:
    """Return the targets of links and pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return found + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", prose(text))
