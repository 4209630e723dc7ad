"""A report on a malicious folder executes nothing, and reads and writes only inside the folder."""

import json
import os

import pytest

from tests.cli.conftest import write
from tests.cli.report.conftest import Page
from trainer.cli import main

EVIL = '"><img src=x onerror=alert(1)></script></pre><script>alert(2)</script>'


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The folder of a run."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "given",
        {
            "run.json": '{"command": "fit", "status": "completed", "steps": 3, "seconds": 1.5, "metrics": {}}\n',
            "csv/metrics.csv": "step,val_loss\n0,1.0\n1,0.5\n2,0.25\n",
            ".hydra/config.yaml": "seed: 1\n",
            "fit.log": "[2026-01-01 00:00:00][a][WARNING] - the log\n",
        },
    )
    return tmp_path / "given"


def page_of(folder):
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def test_names_are_texts_in_the_page(given):
    """Metrics, settings, overrides, variables, the log, a diagnosis, and the folder itself."""
    folder = given.rename(given.with_name(EVIL.replace("/", "_")))
    where = {"command": [EVIL], "versions": {EVIL: EVIL}, "variables": {EVIL: EVIL}, "git": {"branch": EVIL}}
    result = {"recipe": EVIL, "overrides": [f"+a={EVIL}"], "error": EVIL, "status": EVIL, "metrics": {EVIL: 1.0}}
    write(
        folder,
        {
            "run.json": json.dumps(
                {"steps": 3, "command": "fit", "devices": EVIL, "seed": EVIL, "environment": where, **result}
            ),
            ".hydra/config.yaml": json.dumps({EVIL: {EVIL: [EVIL]}, "trainer": {"max_epochs": EVIL}}),
            "csv/metrics.csv": f"step,{EVIL.replace(chr(34), '')},$x^{{\n0,1,2\n1,2,3\n",
            "fit.log": f"[2026-01-01 00:00:00][a][WARNING] - {EVIL}\n{EVIL}\n",
            "diagnosis_step_3.md": f"# {EVIL}\n\n{EVIL}\n\n- {EVIL}\n\n| {EVIL} | {EVIL} |\n",
            "a b&c#.txt": "",
        },
    )
    page = Page(page_of(folder))
    assert len(page.scripts) == 1
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "iframe", "object", "embed", "base", "form"})
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count(EVIL) > 10
    data = [part.partition("</script>")[0] for part in page.html.split('<script type="application/json">')[1:]]
    assert len(data) == len(page.data) > 0
    assert not any("<" in part for part in data)
    (policy,) = [text for text in page.having("meta", "content") if text.startswith("default-src")]
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]


LINKED = ["fit.log", ".hydra/config.yaml", "diagnosis_step_3.md", "run.json"]


@pytest.mark.parametrize("name", LINKED)
def test_link_that_leads_out_is_not_read(given, tmp_path, name):
    secret = "a: the-secret\n# the-secret\n[x][WARNING] - the-secret\n"
    if name.endswith(".json"):
        secret = json.dumps({"status": "the-secret", "error": "the-secret", "environment": {"host": "the-secret"}})
    (tmp_path / "secret").write_text(secret)
    (given / name).unlink(missing_ok=True)
    (given / name).symlink_to(tmp_path / "secret")
    assert "the-secret" not in page_of(given)


def test_log_paths_outside_the_folder_are_not_read(given, tmp_path):
    (tmp_path / "other.log").write_text("the-secret\n")
    write(given, {"run.json": '{"command": "../other"}'})
    assert "the-secret" not in page_of(given)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
def test_pipes_are_not_opened(given):
    for name in ("fit.log", "run.json"):
        (given / name).unlink(missing_ok=True)
        os.mkfifo(given / name)
    page_of(given)


def test_link_at_the_pages_path_is_replaced(given, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (given / "report.html").symlink_to(tmp_path / "mine")
    assert "val_loss" in page_of(given)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (given / "report.html").is_symlink()
    assert [file.name for file in given.iterdir() if "report" in file.name] == ["report.html"]


@pytest.mark.parametrize(
    "entry",
    [
        {"seconds": "long"}, {"steps": 10**400}, {"metrics": {"val_loss": 10**400}}, {"peak_memory": {"cpu": "x"}},
    ],
)  # fmt: skip
def test_malformed_records_raise_a_short_error(given, capsys, entry):
    write(given, {"run.json": json.dumps({"command": "fit", "status": "completed", **entry})})
    assert main(["report", str(given)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"trainer: The files in {given} have contents that no run writes")
    assert err.count("\n") == 1


def test_deeply_nested_values_count_as_missing(given):
    write(given, {"run.json": "[" * 100_000, ".hydra/config.yaml": "a: " + "[" * 1500})
    assert "val_loss" in page_of(given)
