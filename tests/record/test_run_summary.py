"""The table at the end of a completed, failed or interrupted fit."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from tests.support import BOTH_TRAINERS, Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import Curves, OverflowReport, RunRecorder, RunSummary
from trainer.record.run_record import RunRecord


@pytest.fixture
def summary():
    return RunSummary(console=Console(file=io.StringIO(), width=80))


def printed(summary):
    return summary._console.file.getvalue()


def rows(summary):
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed(summary).splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def record(folder, **more):
    """Return the record of a fit in float16."""
    usual = {
        "status": "completed", "precision": "16-mixed", "devices": "2 x CPU", "epochs": 2, "steps": 2000,
        "skipped_steps": 2, "scale": 32768.0, "seconds": 24.0, "train_seconds": 4.0, "samples_per_second": 1213.5,
        "peak_memory": {"process": 3 * 2**30}, "curves": {}, "environment": {},
        "metrics": {"loss": 0.123456, "loss_step": 0.2, "loss_epoch": 0.1, "a_step": 1.0},
        "paths": {"run": str(folder), "record": str(folder / "run.json")},
    }  # fmt: skip
    return RunRecord(usual | more, folder)


def test_table(tmp_path, summary):
    summary.show(shown := record(tmp_path))
    assert summary.summary.keys() == shown.facts.keys() - {"curves", "environment"}
    assert printed(summary).startswith("fit completed")
    assert rows(summary) == {
        "precision": "16-mixed",
        "devices": "2 x CPU",
        "epochs": "2",
        "optimizer steps": "2,000",
        "time": "24.0 s (training 4.0 s)",
        "samples/s": "1,213.5",
        "peak memory": "3,072 MiB",
        "scale": "32,768",
        "skipped steps": "2",
        "loss": "0.1235",
        "a_step": "1",
        "run folder": str(tmp_path),
        "record": str(tmp_path / "run.json"),
        "report": f"python -m trainer report {tmp_path}",
    }


def test_compiled_modules_and_fast_settings(tmp_path):
    summary = RunSummary(console=Console(file=io.StringIO(), width=200))
    facts = {"mode": "max-autotune", "recompilations": 2, "compilations": 3, "modules": ["net"], "seconds": 12.34}
    summary.show(record(tmp_path, compile=facts, fast_settings=["TF32", "channels_last"]))
    expected = "net (max-autotune): 3 graphs in 12.3 s, 2 of them because something had changed"
    assert rows(summary)["compiled"] == expected
    assert rows(summary)["fast settings"] == "TF32, channels_last"


def test_scale_and_skipped_steps_are_printed_once(tmp_path, summary):
    summary.show(record(tmp_path, metrics={"amp/scale": 32768.0, "amp/skipped_steps": 2.0, "amp/skip_rate": 0.5}))
    assert re.findall(r"amp/\w+", printed(summary)) == ["amp/skip_rate"]


def test_paths_as_seen_from_the_working_directory(tmp_path, summary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    paths = {"run": str(run), "best_checkpoint": str(run / "best[1].ckpt"), "loggers": [str(run), "a"]}
    summary.show(record(tmp_path, paths=paths))
    table = rows(summary)
    assert (table["run folder"], table["best checkpoint"], table["logger"]) == ("run", "run/best[1].ckpt", "a")
    assert "report" not in table  # there is no record on the disk
    assert printed(summary).count("logger") == 1  # not that of the run folder


def test_path_is_not_broken_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = RunSummary(console=Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None))
    checkpoint = f"run/{'c' * 120}/epoch=000-step=2.ckpt"
    summary.show(record(tmp_path, paths={"run": str(tmp_path / "run"), "best_checkpoint": str(tmp_path / checkpoint)}))
    lines = printed(summary).splitlines()
    assert [line.split()[-1] for line in lines if "ccc" in line] == [checkpoint]
    assert any("best checkpoint" in line for line in lines)
    assert "run folder" in rows(summary)


def test_fit_cut_short(tmp_path, summary):
    summary.show(record(tmp_path, status="failed", error="a: [b]luck[/b]", seconds=None))
    assert printed(summary).startswith("fit failed: a: [b]luck[/b]")
    assert "time" not in rows(summary)


@BOTH_TRAINERS
def test_real_fit(tmp_path, summary, trainer_class):
    trainer = make_trainer(
        tmp_path, trainer_class, callbacks=[RunRecorder(), Curves(), summary], logger=True, enable_checkpointing=True,
        max_epochs=2, limit_train_batches=3, limit_val_batches=2,
    )  # fmt: skip
    trainer.fit(BoringModel())
    values, paths = summary.summary, summary.summary["paths"]
    assert (values["status"], values["epochs"], values["steps"]) == ("completed", 2, 6)
    assert paths["last_checkpoint"] == trainer.checkpoint_callback.best_model_path  # it monitors nothing
    assert "best_checkpoint" not in paths
    assert all(Path(paths[name]).exists() for name in ("last_checkpoint", "curves"))
    assert paths["loggers"] == [trainer.log_dir]
    written = json.loads(Path(paths["record"]).read_text())
    assert values == {name: fact for name, fact in written.items() if name not in ("curves", "environment")}
    assert printed(summary).count("fit completed") == 1


def test_nothing_is_written_without_a_local_folder(tmp_path, summary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [summary, Curves(), RunRecorder(), OverflowReport(at_step=0)]
    trainer = make_trainer("memory://runs", logger=CSVLogger("memory://logs"), callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(Regression(), loader_of(make_batches(2)))
    assert os.listdir(tmp_path) == []
    assert (summary.summary["status"], summary.summary["paths"]) == ("completed", {})


def test_summary_without_run_recorder_writes_no_file(tmp_path, summary):
    make_trainer(tmp_path, callbacks=[summary]).fit(Regression(), loader_of(make_batches(2)))
    assert summary.summary["paths"] == {"run": str(tmp_path)}
    assert printed(summary).startswith("fit completed")
    assert not list(tmp_path.iterdir())
