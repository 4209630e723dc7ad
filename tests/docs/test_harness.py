"""The runner of pages detects errors in a page."""

import shutil

import pytest

from tests.docs.execute import run
from tests.docs.output import missing_line
from tests.docs.pages import PageError, anchors, blocks, links


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Words.\n\n    python -m trainer fit\n", "page:3: an indented block"),
        ("```\nls\n```\n", "page:1: language ''"),
        ("<!-- not run -->\n```bash\nls\n```\n", "expected <!-- not run: ... -->"),
        ("<!-- file: ../mine.yaml -->\n```yaml\n```\n", "not in the reader's folder"),
    ],
)
def test_blocks_that_would_not_run_are_refused(text, message):
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


def run_page(text, tmp_path, python):
    folder = tmp_path / "folder"
    folder.mkdir()
    return run(blocks(text), folder, tmp_path / "tools", python, timeout=60.0)


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
def test_notices(text, message, tmp_path, python):
    with pytest.raises(AssertionError) as error:
        run_page(text, tmp_path, python)
    assert message in str(error.value)
