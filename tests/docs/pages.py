"""The fenced blocks of a page of the documentation, and what is to be done with each.

What an author may write in the line before a block, each a comment of its own:

- ``<!-- file: conf/recipe/mine.yaml -->``: the block is written to that file.
- ``<!-- output -->``: the block is what the block of commands before it prints (`tests.docs.output`).
- ``<!-- fails -->``: the last command of the block ends with an error.
- ``<!-- limits: none -->``: the commands run as they are written, without the limits that make them short; or with
  these limits, ``<!-- limits: trainer.max_epochs=2 -->``.
- ``<!-- not run: the reason -->``: the block is not looked at, and is counted.
"""

from __future__ import annotations

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
"""Languages of blocks that must be well formed, where they are not written to a file that is used."""

SHOWN = ("text", "diff")
"""Languages of blocks that nobody checks. They are counted, but for outputs."""

MARKERS = {"file": True, "output": False, "fails": False, "limits": True, "not run": True}
"""And whether they need a value."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: its language.
        text: what is in it.
        line: of the page, from 1, where it begins.
        markers: values of `MARKERS`.
    """

    language: str
    text: str
    line: int
    markers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_checked(self) -> bool:
        """Whether anything fails when it is wrong."""
        if "not run" in self.markers:
            return False
        return self.language not in SHOWN or "file" in self.markers or "output" in self.markers


class PageError(AssertionError):
    """A page breaks the rules for authors."""


def read(page: Path) -> list[Block]:
    """The blocks of a page, in order.

    Raises:
        PageError: a block that is indented instead of fenced, or has another language than those above, or a marker
            that cannot be.
    """
    return blocks(page.read_text(encoding="utf-8"), page.name)


def blocks(text: str, name: str = "page") -> list[Block]:
    """Those of a page's text."""
    found = []
    comment = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
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
    """What the comments before a block say."""
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


def prose(text: str) -> str:
    """A page without its blocks, inline code and comments."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a link to a heading of this page may end in: as GitHub makes it."""
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def links(text: str) -> list[str]:
    """The targets of links and pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return found + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", prose(text))
