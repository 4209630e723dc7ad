"""Signals to the command line: saved checkpoints and exit status."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.cli.sweep.test_jobs import sweep
from trainer.cli import main

LINE = ["+recipe=line", "model=stopped", "callbacks=none", "logger=none"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_exit_status_has_the_signal(stopped, number, status):
    assert main(["fit", *LINE, f"model.number={int(number)}", "hydra.run.dir=run"]) == status
    assert json.loads(Path("run/run.json").read_text())["status"] == "interrupted"
    (path,) = stopped.rglob("*.ckpt")
    assert (path.name, torch.load(path, weights_only=True)["global_step"]) == ("interrupted.ckpt", 3)


@pytest.mark.whole
def test_sweep_passes_the_signal_on_to_its_job_and_ends(stopped, python):
    done = sweep(python, "fit", "-m", *LINE, "model.receivers=[sweep]", "seed=1,2", "hydra.sweep.dir=jobs")
    assert done.returncode == 143, done.stderr
    (job,) = json.loads(Path("jobs/summary.json").read_text())
    assert (job["job"], job["status"], job["exit_status"], job["steps"]) == (0, "interrupted", 143, 3)
    (path,) = stopped.rglob("*.ckpt")
    assert (path.name, torch.load(path, weights_only=True)["global_step"]) == ("interrupted.ckpt", 3)
    assert "Sweep of 1 job" in done.stdout
