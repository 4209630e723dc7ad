"""The script trains the requested recipes, keeps complete runs, and writes results and missing ones to its table."""

import os
import re
from pathlib import Path

import pytest

from tests.scripts.conftest import loaded
from trainer.record.run_record import load_run

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_recipes"
QUICK = ["trainer.max_epochs=2", "trainer.limit_train_batches=2", "logger=none", "callbacks=none"]
PAGE = """before
<!-- verify_recipes: start -->
| `tabular` | 32-true | an old row |
| `tabular` | bf16-mixed | of another precision |
| `gan`, `trainer.max_epochs=1` | 16-mixed | of another recipe |
<!-- verify_recipes: end -->
after
"""


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    with loaded("verify_recipes") as module:
        yield module


def rows(page):
    """Return the cells of the table's rows."""
    lines = re.findall(r"^\| (`.*) \|$", page.read_text(), re.MULTILINE)
    return {tuple(cells[:2]): cells[2:] for cells in (line.split(" | ") for line in lines)}


def test_complete_runs_are_kept_and_missing_ones_trained(tmp_path, python):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    environment = {**os.environ, "AMP_BENCH": "1", "TORCH_HOME": str(tmp_path)}

    def run(*words, recipes=("tabular",)):
        options = ["--recipes", *recipes, "--precisions", "32", "16-mixed", "--markdown", str(page)]
        return python.run(str(SCRIPT), *options, *words, env=environment, cwd=tmp_path)

    done = run(*QUICK, recipes=("tabular", "resnet50_caltech256"))
    assert done.returncode == 0, done.stderr[-2000:]
    text, folder = page.read_text(), tmp_path / "outputs" / "verify_recipes" / "tabular"
    kept = [line for line in PAGE.splitlines() if "an old row" not in line]
    assert [line for line in text.splitlines() if line in PAGE.splitlines()] == kept
    found, name = rows(page), "`, `".join(["`tabular", *QUICK]) + "`"
    for precision, scale in (("32-true", "-"), ("16-mixed", "65,536")):
        record = load_run(folder / precision)
        assert (record.epochs, record.steps, record.precision) == (2, 4, precision)
        cells = found[name, precision]
        assert f"`val_acc` {record.metrics['val_acc']:.4g}" in cells[1]
        assert cells[2:4] == [str(record.skipped_steps), scale]
        assert re.fullmatch(rf"{record.train_seconds:,.1f}( \([\d.]+ cores\))?", cells[4])  # if it took a second
        assert cells[5] == f"{record.peak_memory / 2**20:,.0f} MiB"
    assert "not run: Caltech-256 (1.2 GB) and ImageNet's weights of ResNet-50 (98 MB) are not here." in text
    assert "`scripts/verify_recipes --recipes resnet50_caltech256 --with-network --markdown docs/recipes.md`" in text

    changed = (folder / "32-true" / "run.json").stat().st_mtime_ns
    done = run(*QUICK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert page.read_text() == text
    assert (folder / "32-true" / "run.json").stat().st_mtime_ns == changed  # it was complete

    done = run(*QUICK, "model.width=none", recipes=("tabular", "resnet50_caltech256"))
    assert done.returncode == 1
    failed = {key: cells for key, cells in rows(page).items() if "`model.width=none`" in key[0]}
    assert [key[1] for key in failed] == ["32-true", "16-mixed"]  # the second is tried, too
    assert all(cells[0].startswith("failed: ") and "width" in cells[0] for cells in failed.values())
    assert "not run: Caltech-256" in page.read_text()


def test_downloads_require_the_option(script, tmp_path, monkeypatch):
    file, got = tmp_path / "data" / "text.txt", []

    def get(place):
        got.append(place)
        if len(got) == 1:
            raise OSError("no route to host")
        place.write_text("words")

    need = script.Need("a text (1 MB)", lambda: [file], get)
    monkeypatch.setitem(script.CASES, "gpt", script.Case("gpt", needs=(need,)))
    monkeypatch.setattr(script, "train", lambda words, folder: script.load_run(folder))
    monkeypatch.setattr(script, "last_words", lambda folder: "|trained|")

    def first_row(*words):
        suite = script.Suite(script.parse(["--recipes", "gpt", "--precisions", "32", f"--folder={tmp_path}", *words]))
        suite.run()
        return next(iter(suite.rows.values()))

    assert "not run: a text (1 MB) is not here. `scripts/verify_recipes --recipes gpt --with-" in first_row()
    assert "a text (1 MB) could not be downloaded: OSError: no route to host | -" in first_row("--with-network")
    assert r"failed: \|trained\| |" in first_row("--with-network")
    assert r"failed: \|trained\| |" in first_row("--with-network")
    assert got == [file, file]  # downloaded by the first run


def test_every_recipe_has_a_row(script):
    recipes = {file.stem for file in (SCRIPT.parents[1] / "conf" / "recipe").glob("*.yaml")}
    assert {case.recipe for case in script.CASES.values()} == recipes
