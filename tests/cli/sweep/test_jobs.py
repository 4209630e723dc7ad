"""Parallel and remote jobs of a sweep: their devices, their signals, and resuming after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _faults.bench import wait_until

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.sweep.parallel_launcher import ParallelLauncher
from trainer.common.machine import Cores

LINE = ["+recipe=line", "model=stopped", "callbacks=none", "logger=none", "resume=auto"]


def results(folder="jobs"):
    return json.loads(Path(folder, "summary.json").read_text())


def sweep(python, *words):
    """Run a sweep; its process id is in the file ``sweep``."""
    pipe = subprocess.PIPE
    with python.start("-m", "trainer", *words, stdout=pipe, stderr=pipe, text=True) as process:
        Path("sweep").write_text(str(process.pid))
        out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.whole
def test_signal_ends_parallel_jobs_and_the_same_command_completes_the_sweep(stopped, python):
    places = ["hydra/launcher=parallel", "hydra.sweep.dir=jobs"]
    words = ["fit", "-m", *LINE, "model.receivers=[sweep]", "seed=1,2,3", *places]
    done = sweep(python, *words)
    assert done.returncode == 143, done.stderr
    assert "interrupted" in [job["status"] for job in results()]
    assert not Path("jobs/2").exists()  # it was not begun any more
    done = sweep(python, *words)
    assert done.returncode == 0, done.stderr
    first, second, third = results()
    assert [(job["status"], job["steps"]) for job in (first, second, third)] == [("completed", 8)] * 3
    assert first["metrics"] == second["metrics"] == third["metrics"]  # the third was never interrupted
    assert re.search(r"^Job 2: .*seed=3.*, [\d.]+ s, completed$", done.stdout, re.MULTILINE)
    assert "Sweep of 3 jobs" in done.stdout
    assert Path("jobs/2/console.log").is_file()  # the output of a run is not mixed with that of others
    assert sweep(python, *words).stdout.count(", completed in an earlier sweep\n") == 3


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="submitit tells by it that time is up")
def test_job_requeued_by_submitit_is_resumed(stopped, python):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    number = int(signal.SIGUSR2)
    arguments = [f"model.number={number}", "model.receivers=[parent]"]  # submitit's process
    words = ["fit", "-m", *LINE, *arguments, "hydra/launcher=submitit_local", "hydra.sweep.dir=jobs"]
    done = sweep(python, *words)
    assert done.returncode == 0, done.stderr
    (job,) = results()
    assert (job["status"], job["epochs"], job["steps"]) == ("completed", 2, 8)
    assert "resuming from" in Path("jobs/0/fit.log").read_text()
    (log,) = Path("jobs/.submitit").glob("*/*_log.err")
    assert "Caught signal SIGUSR2" in log.read_text()


@pytest.mark.whole
@pytest.mark.skipif(os.name != "posix", reason="a process learns of its parent's end on POSIX only")
def test_jobs_end_with_a_sweep_that_is_killed(stopped, python):
    kill = [f"model.number={int(signal.SIGKILL)}", "model.receivers=[parent]"]
    words = ["fit", "-m", *LINE, *kill, "hydra.sweep.dir=jobs", "trainer.max_epochs=100000"]
    assert sweep(python, *words).returncode == -9
    wait_until(lambda: json.loads(Path("jobs/0/run.json").read_text())["status"] != "running", 120)
    assert json.loads(Path("jobs/0/run.json").read_text())["status"] == "interrupted"
    assert Path("jobs/0/checkpoints/interrupted.ckpt").is_file()


@pytest.fixture
def parallel(jobs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    return jobs.started


SIDE_BY_SIDE = ["fit", "-m", "+recipe=line", "hydra/launcher=parallel", "hydra.sweep.dir=jobs"]


@pytest.mark.whole
def test_parallel_jobs_share_cores_and_gpus(parallel, monkeypatch):
    monkeypatch.setattr("trainer.common.machine.cores", lambda: Cores(total=16, allowed=13))
    assert main([*SIDE_BY_SIDE, "seed=1,2,3", "hydra.launcher.n_jobs=3", "hydra.launcher.gpus_per_job=1"]) == 0
    assert {job.environment["OMP_NUM_THREADS"] for job in parallel} == {"4"}
    assert {job.environment["CUDA_VISIBLE_DEVICES"] for job in parallel} <= {"4", "5", "7"}
    assert all(job.options["own_session"] for job in parallel)
    assert sorted(job.value("seed") for job in parallel) == ["1", "2", "3"]
    launcher = ParallelLauncher(n_jobs=3, gpus_per_job=1)
    launcher.setup(hydra_context=None, task_function=None, config=None)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in launcher.places] == ["4", "5", "7"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # of the user
    assert main(["hydra/launcher=joblib" if "launcher" in word else word for word in [*SIDE_BY_SIDE, "seed=1"]]) == 0
    assert (parallel[3].environment["OMP_NUM_THREADS"], parallel[3].environment["CUDA_VISIBLE_DEVICES"]) == (
        "7",
        "4,5,7",
    )
    assert main([*SIDE_BY_SIDE, "seed=1", "hydra.launcher.threads_per_job=2"]) == 0
    assert parallel[4].environment["OMP_NUM_THREADS"] == "2"


def test_launcher_that_cannot_run(parallel, capsys, monkeypatch):
    """Numbers that are out of range, and a package or a program that is not installed."""
    missing = [""]
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: name not in missing)
    monkeypatch.setenv("PATH", "")
    for missing[0], words, complaint in (
        ("", ["n_jobs=2", "gpus_per_job=2"], "n_jobs=2 and hydra.launcher.gpus_per_job=2 need 4 GPUs, but"),
        ("", ["gpus_per_job=0"], "gpus_per_job is 0, expected at least 1, or null."),
        ("", ["n_jobs=0"], "n_jobs is 0, expected at least 1, or -1 for all cores."),
        ("", ["n_jobs=null"], "n_jobs is null, expected a whole number."),
    ):
        assert main([*SIDE_BY_SIDE, "seed=1", *(f"hydra.launcher.{word}" for word in words)]) == 2
        assert complaint in capsys.readouterr().err
    slurm = ["fit", "-m", "+recipe=line", "seed=1,2", "hydra/launcher=submitit_slurm"]
    for missing[0], status, complaint in (
        ("submitit", 2, "needs submitit, which is not installed: pip install hydra-submitit-launcher submitit"),
        ("", 1, 'Could not detect "srun"'),
    ):
        assert main(slurm) == status
        assert complaint in capsys.readouterr().err
    assert not parallel


SBATCH = f"""#!{sys.executable}
import shutil, sys
shutil.copy(sys.argv[1], "script.sh")
sys.exit("no queue here")
"""


@pytest.mark.whole
def test_slurm_options_equal_the_settings(project, monkeypatch, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    write(project, {"bin/sbatch": SBATCH, "bin/srun": "#!/bin/sh\n"})
    for name in ("sbatch", "srun"):
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{project / 'bin'}{os.pathsep}{os.environ['PATH']}")
    settings = ["partition=gpu", "gpus_per_node=2", "tasks_per_node=2", "timeout_min=90", "mem_gb=32"]
    words = ["seed=1,2", "hydra/launcher=submitit_slurm", *(f"hydra.launcher.{word}" for word in settings)]
    assert main(["fit", "-m", "+recipe=line", *words]) == 1
    assert "no queue here" in capsys.readouterr().err
    script = Path("script.sh").read_text()
    for line in ("--partition=gpu", "--gpus-per-node=2", "--ntasks-per-node=2", "--time=90", "--mem=32GB",
                 "--signal=USR2@120", "--array=0-1%2", "--open-mode=append"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script, script
