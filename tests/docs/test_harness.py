"""The runner of pages detects errors in a page."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest

from tests.docs.execute import run
from tests.docs.output import missing_line
from tests.docs.pages import Block, PageError, anchors, blocks, links
from tests.warm_python import WarmPython


def page(text: str) -> list[Block]:
    return blocks(textwrap.dedent(text))


def test_blocks_and_markers_are_read():
    found = page(
        """
        Words.

        <!-- file: conf/recipe/mine.yaml -->
        ```yaml
        seed: 7
        ```

        - in a list:

          <!-- limits: none --> <!-- fails -->
          ```bash
          false
          ```

        <!-- a remark -->

        ```text
        shown
        ```
        """
    )
    assert found == [
        Block("yaml", "seed: 7\n", 5, {"file": "conf/recipe/mine.yaml"}),
        Block("bash", "false\n", 12, {"limits": "none", "fails": ""}),
        Block("text", "shown\n", 18, {}),
    ]
    assert [block.is_checked for block in found] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Words.\n\n    python -m trainer fit\n", "page:3: an indented block"),
        ("```\nls\n```\n", "page:1: language ''"),
        ("<!-- not run -->\n```bash\nls\n```\n", "expected <!-- not run: ... -->"),
        ("<!-- file: ../mine.yaml -->\n```yaml\n```\n", "not in the reader's folder"),
    ],
)
def test_blocks_that_would_not_run_are_refused(text: str, message: str):
    with pytest.raises(PageError) as error:
        blocks(text)
    assert message in str(error.value)


def test_finds_links_and_headings():
    text = "# A `b-c`: d?\n\n## A [link](x.md)\n## Same\n## Same\n[one](y.md#z) `[no](n)`\n```bash\n# no\n```\n"
    assert anchors(text) == {"a-b-c-d", "a-link", "same", "same-1"}
    assert links(text) == ["x.md", "y.md#z"]


def test_compares_outputs():
    printed = "fit finished\n  loss    0.25\n │ it overflows in 'a' (Linear) │\n16-mixed at scale 65536\n"
    assert missing_line("fit finished\nloss 1.5e-3\n...\n16-mixed at scale 1\n", printed) is None
    assert missing_line("it ... in 'a'\n", printed) is None
    assert missing_line("it overflows in 'b'\n", printed) == "it overflows in 'b'"
    assert missing_line("16-mixed\nfit finished\n", printed) == "fit finished"


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are written for a shell")


def run_page(text: str, tmp_path: Path, python: WarmPython) -> str:
    folder = tmp_path / "folder"
    folder.mkdir()
    return run(page(text), folder, tmp_path / "tools", python, timeout=60.0)


@needs_bash
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\nscripts/nothing\n```\n", "ended with status 127"),
        ("```bash\npip install '.[nothing]'\n```\n", "There is no extra nothing"),
        ("```bash\npython -m trainer fit +recipe=nothing\n```\n", "ended with status 2"),
        ("```yaml\na: [\n```\n", "is no yaml"),
        ("<!-- fails -->\n```bash\ntrue\n```\n", "It was to fail, and did not."),
        ("```bash\necho one\n```\n<!-- output -->\n```text\ntwo\n```\n", "'two', which was not printed"),
    ],
)
def test_notices(text: str, message: str, tmp_path: Path, python: WarmPython):
    with pytest.raises(AssertionError) as error:
        run_page(text, tmp_path, python)
    assert message in str(error.value)
