"""The ecosystem suite detects equal and different results, with a program in this file."""

import json
from pathlib import Path

import torch
from _ecosystem.compare import KNOWN, differences
from _ecosystem.describe import Describer

from tests.scripts.conftest import loaded

ROOT = Path(__file__).parents[2]

PROGRAM = '''
"""A tiny module."""

import os
import signal

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

REQUIRES = ("torch", "lightning")
VARIES = ("number$",)


class Tiny(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss


def case_tiny(run):
    """Fit, reload, resume."""
    data = DataLoader(RandomDataset(32, 12), batch_size=4, shuffle=True)
    trainer = run.Trainer(max_epochs=1, gradient_clip_val=0.1, limit_val_batches=0)
    trainer.fit(Tiny(), data)
    path = trainer.checkpoint_callback.best_model_path
    run.reload(Tiny, path)
    with run.resume():
        Trainer(max_epochs=2, accelerator="cpu", limit_val_batches=0).fit(Tiny(), data, ckpt_path=path)
    run.keep("class", type(trainer).__module__)
    run.keep("number", id(trainer))


def case_killed(run):
    """Ends early."""
    os.kill(os.getpid(), signal.SIGKILL)
'''


def test_program_is_run_with_both_and_differences_are_named(tmp_path, python):
    program = tmp_path / "tiny.py"
    program.write_text(PROGRAM)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ecosystem: start -->\nold\n<!-- ecosystem: end -->\nafter\n")
    words = ["--here", "--program", program, "--keep", tmp_path / "kept", "--markdown", page]
    script = str(ROOT / "scripts" / "ecosystem")
    done = python.run(script, *map(str, words))
    assert done.returncode == 1, done.stderr[-2000:]
    row, killed = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert row["errors"] == {}
    assert [error.strip() for error in killed["errors"].values()] == ["ended with status -9"] * 2
    assert row["columns"] == ["weights", "metrics", "hooks", "checkpoint", "reload", "resume", "results"]
    unknown = [(one["column"], one["where"], one["theirs"]) for one in row["differences"] if not one["known"]]
    assert unknown == [("results", "class", "'lightning.pytorch.trainer.trainer'")]
    text = page.read_text()
    assert "| tiny | tiny | same | same (1) | same | same (2) | same | same (1) | **differs** |" in text
    assert "(1) Arguments: the norm before clipping is logged as `grad_norm`." in text
    assert f"torch {torch.__version__.partition('+')[0]}." in text
    assert "\nold\n" not in text
    assert "| tiny | killed | fails |" in text
    saved = torch.load(tmp_path / "kept" / "tiny" / "tiny" / "ours" / "record.pt", weights_only=False)
    assert saved["hooks"]["1. fit: calls"]["Tiny.training_step"] == 3
    assert saved["resume"]["hooks: 2. fit: calls"]["callback.on_train_batch_end"] == 3  # the library builds our Trainer


def test_cases_with_the_same_results_share_a_row():
    with loaded("ecosystem") as script:
        known = {"column": "metrics", "known": "a sentence of the guide"}
        rows = [
            script.Row("lib", "one", "lib 1.0, torch 2.15", columns=["weights", "metrics"], differences=[known]),
            script.Row("lib", "two", "lib 1.0, torch 2.15", columns=["weights", "resume"]),
            script.Row("lib", "bad", "torch 2.15", columns=["weights"], differences=[{**known, "known": ""}]),
        ]
        rows[2].differences[0]["column"] = "weights"
        text = script.markdown(rows)
    assert text.splitlines()[2:4] == [
        "| lib | one, two | same | same (1) | - | - | - | same | - |",
        "| lib | bad | **differs** | - | - | - | - | - | - |",
    ]
    assert text.endswith("on a CPU; lib 1.0, torch 2.15.")


def record(**columns):
    return {name: Describer("/here")(value) for name, value in columns.items()}


def test_equal_to_the_bit():
    weights = {"w": torch.tensor([1.0, torch.nan]), "n": torch.tensor(3), "loss": float("nan")}
    assert differences(record(weights=weights), record(weights=weights)) == []
    other = {**weights, "w": torch.tensor([1.0 + 2**-23, torch.nan])}
    (one,) = differences(record(weights=weights), record(weights=other))
    assert (one.column, one.where, one.kind, one.known) == ("weights", "w", "other", "")
    assert one.ours == "1.19e-07 apart"


def test_differences_named_in_the_guide_are_known():
    theirs = record(checkpoint={"a.ckpt": {"loops": {"fit_loop": 1}}}, metrics={"rows": [["logger", 0, {"loss": 1.0}]]})
    rows = [["logger", 0, {"loss": 1.0, "grad_norm": 2.0}], ["logger", 0, {"grad_norm_epoch": 2.0, "epoch": 0}]]
    ours = record(checkpoint={"a.ckpt": {"loops": {"fit_loop": 1, "amp_trainer": 2}}}, metrics={"rows": rows})
    places = ["rows/grad_norm", "rows/grad_norm_epoch", "a.ckpt/loops/amp_trainer"]
    assert [(one.where, bool(one.known)) for one in differences(theirs, ours)] == [(place, True) for place in places]
    assert [one.known for one in differences(ours, theirs)] == ["", ""]  # the other way round it is not


def test_numbers_that_keep_their_digits_are_known_unless_they_are_weights():
    theirs = {"a": torch.tensor(0.1), "b": 0.10000000149011612}
    ours = {"a": torch.tensor(0.1, dtype=torch.float64), "b": 0.1}
    found = differences(record(metrics=theirs), record(metrics=ours))
    assert [(one.kind, bool(one.known)) for one in found] == [("digits", True)] * 2
    assert not any(one.known for one in differences(record(weights=theirs), record(weights=ours)))
    (one,) = differences(record(metrics={"b": 0.1}), record(metrics={"b": 0.10001}))
    assert not one.known


def test_plateau_schedule_is_known_in_resumed_runs_only():
    theirs, ours = ({"schedules/0": {"best": 1.0, "num_bad_epochs": 0, "last_epoch": last}} for last in (2, 3))
    (one,) = differences(record(resume=theirs), record(resume=ours))
    assert (one.where, one.kind, bool(one.known)) == ("schedules/0/last_epoch", "plateau", True)
    assert not differences(record(weights=theirs), record(weights=ours))[0].known
    theirs, ours = ({"schedules/0": {"last_epoch": last}} for last in (2, 3))  # another schedule
    assert not differences(record(resume=theirs), record(resume=ours))[0].known


def test_known_differences_are_quoted_from_the_guide():
    guide = (ROOT / "docs" / "migrating-from-lightning.md").read_text()
    sections = {part.partition("\n")[0]: " ".join(part.split()) for part in guide.split("\n## ")}
    for known in KNOWN:
        assert known.quote in sections[known.section]
