"""Building the site: errors in pages fail the build."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, ROOT

pytestmark = pytest.mark.whole


def build(folder, site):
    """Build the site as `scripts/docs` does, and return the output."""
    script = (ROOT / "scripts" / "docs").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\.venv/bin/python (.*) \"\$@\" \. build/docs$", script, re.MULTILINE)
    words = [sys.executable, *command.split(), ".", str(site)]
    done = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout + f"status {done.returncode}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert build(ROOT, folder) == "status 0"
    return folder


def test_has_all_pages_and_finds_them(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = set(json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["docnames"])
    pages = {page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES} - {"README"}
    assert found == pages | {"CHANGELOG", "CONTRIBUTING"}
    assert all((site / f"{page}.html").is_file() for page in found)


def test_contents_are_those_of_the_index(site):
    contents = (site / "docs" / "sweeps.html").read_text(encoding="utf-8").split("sidebar-tree")[1]
    assert re.findall(r'caption-text">([^<]*)', contents)[:3] == ["Getting started", "Mixed precision", "Running"]
    assert '<a class="reference internal" href="reliability.html">Reliability</a>' in contents
    assert '<a class="reference internal" href="api/callbacks.html">trainer.callbacks</a>' in contents
    assert '<a class="reference internal" href="../CONTRIBUTING.html">Contributing</a>' in contents


def test_files_are_shown(site):
    features = (site / "docs" / "features.html").read_text(encoding="utf-8")
    assert 'href="../files/trainer/loop/fit.py.html"' in features
    assert '<span class="nc" id="FitLoop">' in (site / "files/trainer/loop/fit.py.html").read_text(encoding="utf-8")
    for page in site.glob("docs/**/*.html"):
        links = re.findall(r'href="(?:\.\./)+files/([^"#]+)#?([^"]*)"', page.read_text(encoding="utf-8"))
        for path, name in links:
            text = (site / "files" / path).read_text(encoding="utf-8")
            assert not name or f'id="{name}"' in text, f"{page.name}: {path}#{name}"


def test_errors_in_pages_fail_the_build(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("conf.py", "site.css"):
        shutil.copy(ROOT / "docs" / name, docs)
    (docs / "index.md").write_text("# Pages\n\n## All\n\n[a](a.md) [b](nowhere.py) [c](a.md#no)\n")
    (docs / "a.md").write_text("# A\n")
    (docs / "alone.md").write_text("# Alone\n")
    said = build(tmp_path, tmp_path / "site")
    assert said.endswith("status 1")
    assert "index.md:5: WARNING: 'myst' cross-reference target not found: 'nowhere.py'" in said
    assert "index.md:5: WARNING: local id not found in doc 'docs/a': 'no'" in said
    assert "alone.md: WARNING: document isn't included in any toctree" in said
    assert said.count("WARNING") == 3
