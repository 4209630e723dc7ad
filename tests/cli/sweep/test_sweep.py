"""Sweeps: a process and a folder for each job, a table at the end, and failures of single jobs."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.sweep import report
from trainer.cli.sweep.jobs import Job as SweepJob
from trainer.record.run_record import read_json

LINE = ["+recipe=line", "callbacks=none", "logger=none", "trainer.enable_checkpointing=false"]


@pytest.mark.whole
def test_sweep_loses_only_the_job_that_fails(project, python, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # left behind by something else in this shell
    monkeypatch.setenv("MASTER_PORT", "1")
    settings = ["precision=16", "precision.init_scale=1024", "model.fail_at=1,null", "hydra.sweep.dir=jobs"]
    done = python.trainer("fit", "-m", *LINE, *settings)
    assert done.returncode == 1, done.stderr
    results = json.loads(Path("jobs/summary.json").read_text())
    assert [(job["job"], job["status"]) for job in results] == [(0, "failed"), (1, "completed")]
    assert results[0]["error"] == "RuntimeError: asked to fail"
    assert [(job["epochs"], job["steps"], job["scale"]) for job in results] == [(0, 1, 1024.0), (2, 8, 1024.0)]
    assert [Path(job["run_dir"]) for job in results] == [project / "jobs" / "0", project / "jobs" / "1"]
    before_table, _, _ = done.stdout.partition("Sweep of 2 jobs")
    note, failed, error, place, *rest = before_table.splitlines()
    assert note.startswith("The jobs write their output to console.log in their folders in jobs.")
    assert re.fullmatch(r"Job 0: \+recipe=line .* model\.fail_at=1, [\d.]+ s, failed", failed)
    assert error == "  trainer: RuntimeError: asked to fail"
    assert place.startswith("    Raised in line_fit.py:")
    assert re.fullmatch(r"Job 1: \+recipe=line .* model\.fail_at=null, [\d.]+ s, completed", rest[-1])
    assert "Results are in jobs" in done.stdout
    assert done.stdout.count("asked to fail") == 3  # with the line of code, and once below the table
    assert "fit completed" in Path("jobs/1/console.log").read_text()
    assert "fit completed" not in done.stdout


def result(job, **more):
    usual = {
        "job": job,
        "overrides": ["+recipe=a", f"optimizer.lr={job}", "command=fit"],
        "run_dir": f"jobs/{job}",
        "status": "completed",
        "epochs": 3,
        "seconds": 61.25,
        "skipped_steps": 2,
        "scale": 32768.0,
        "peak_memory": {"gpu": 2**31},
        "metrics": {"val_acc": 0.98765, "val_loss_step": 1.0, "val_loss": 0.1, "lr": 0.5, "test_acc": 0.9},
    }
    return usual | more


def left(folder, *jobs):
    write(folder, {f"{job['job']}/run.json": json.dumps(job) for job in jobs})
    return folder


def test_table_has_the_differences_and_results(tmp_path, capsys):
    failed = result(10, scale=None, status="failed", error="Oops: no", metrics={})
    left(tmp_path, result(0), failed, result(2), result(1))
    os.utime(tmp_path / "1" / "run.json", (1000.0, 1000.0))  # of an earlier sweep in the same folder
    write(tmp_path, {"left_over/run.json": json.dumps({"status": "completed"})})
    assert report(tmp_path, since=2000.0) == 1
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert "| time | test_acc | val_acc | val_loss | skipped | scale | memory | run dir |" in lines[0]
    assert lines[2:] == [
        "| 0 | optimizer.lr=0 | completed | 3 | 61.2 s | 0.9 | 0.9877 | 0.1 | 2 | 32,768 | 2,048 MiB | 0 |",
        "| 2 | optimizer.lr=2 | completed | 3 | 61.2 s | 0.9 | 0.9877 | 0.1 | 2 | 32,768 | 2,048 MiB | 2 |",
        "| 10 | optimizer.lr=10 | failed | 3 | 61.2 s | - | - | - | 2 | - | 2,048 MiB | 10 |",
    ]
    out = capsys.readouterr().out
    assert "0.9877" in out
    assert "Job 10 failed: Oops: no" in out


def test_error_is_whole_only_once(tmp_path, capsys, monkeypatch):
    """In the line about its job, which a quiet sweep does not print."""
    error = f"Oops: {'no ' * 50}\nand the rest"
    left(tmp_path, result(0, status="failed", error=error, metrics={}))
    report(tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Job 0 failed: Oops: no")]
    assert line.endswith("no [...]")
    assert len(line) <= 120
    monkeypatch.setenv("TRAINER_QUIET", "1")
    report(tmp_path)
    assert f"Job 0 failed: {error}" in capsys.readouterr().out


def test_fit_that_fails_before_its_training_has_no_time(project, python):
    settings = ["+recipe=line", "callbacks.learning_rate_monitor=null", "hydra.sweep.dir=jobs"]
    assert python.trainer("fit", "-m", *settings, "optimizer._target_=torch.optim.SGDD,torch.optim.SGD").returncode == 1
    failed, completed = (read_json(Path("jobs") / number) for number in "01")
    assert (failed["status"], "seconds" in failed) == ("failed", False)
    assert completed["seconds"] > 0


def reached(job, value, mode="min", metric="loss", **more):
    """A job and its value."""
    metrics = more.pop("metrics", {}) | ({} if value is None else {metric: value})
    return result(job, objective={"metric": metric, "mode": mode}, metrics=metrics, **more)


def test_best_job_is_reported_and_has_a_value(tmp_path, capsys):
    left(
        tmp_path,
        reached(0, 0.4, metrics={"val_acc": 1.0, "test_acc": 1.0}),
        reached(1, 0.2),
        reached(2, float("nan")),
        reached(3, 0.1, status="failed", error="Oops"),
        reached(4, 0.15, status="pruned"),
        reached(5, 0.2),
    )
    assert report(tmp_path) == 1  # a job that was pruned has not failed
    assert [job["job"] for job in json.loads((tmp_path / "summary.json").read_text()) if job["best"]] == [1]
    header, _, *rows, _, sentence, _, command = (tmp_path / "summary.md").read_text().splitlines()
    assert header.startswith("| job | overrides | status | epochs | time | loss | test_acc | val_acc |")
    assert [row.split(" | ")[0] for row in rows if "best" in row] == ["| 1 (best)"]
    assert sentence == "Best: job 1, with the lowest loss, 0.2: optimizer.lr=1"
    assert command == "    python -m trainer fit +recipe=a optimizer.lr=1"
    assert sentence in capsys.readouterr().out


def test_means_over_seeds_and_folds(tmp_path):
    def job(number, value, *own, **more):
        return reached(number, value, overrides=["command=fit", "+recipe=a", *own], **more)

    left(
        tmp_path,
        job(0, 0.1, "optimizer.lr=1", "seed=1", "+data.fold=0"),
        job(1, 0.2, "optimizer.lr=1", "seed=2", "+data.fold=1"),
        job(2, 0.6, "optimizer.lr=1", "seed=3", "+data.fold=1"),
        job(3, 9.0, "optimizer.lr=1", "seed=4", "+data.fold=0", status="failed"),
        job(4, 0.8, "optimizer.lr=3", "seed=1", "+data.fold=0"),
        job(5, 0.9, "optimizer.lr=4", "data.split_seed=1"),
        job(6, 0.9, "optimizer.lr=4", "data.split_seed=2"),
        job(7, 0.7, "optimizer.lr=5", "seed=1"),
        job(8, 0.0, "optimizer.lr=5", "seed=2"),
    )
    report(tmp_path)
    lines = (tmp_path / "summary.md").read_text().split("|\n\n")[1].splitlines()
    means = ["Mean of 3 jobs optimizer.lr=1: loss 0.3 ± 0.26", "Mean of 2 jobs optimizer.lr=5: loss 0.35 ± 0.49"]
    assert lines[:3] == [*means, ""]
    # the other has fewer completed jobs
    assert lines[3] == "Best: optimizer.lr=1, with the lowest mean loss, 0.3 ± 0.26 over 3 jobs"


@pytest.mark.parametrize(
    ("rates", "best"), [((1,), ""), ((1, 2), "Best: optimizer.lr=2, with the highest mean loss, ")]
)
def test_result_of_a_sweep_over_folds(rates, best, tmp_path, capsys):
    values = {1: (0.1, 0.9), 2: (0.7, 0.8)}  # the best job is not one of the best folds
    jobs = [
        reached(
            10 * rate + fold,
            value,
            "max",
            overrides=["+recipe=a", f"optimizer.lr={rate}", f"data.fold={fold}"],
            paths={"best_checkpoint": "a.ckpt"},
        )
        for rate in rates
        for fold, value in enumerate(values[rate])
    ]
    report(left(tmp_path, *jobs))
    text, out = (tmp_path / "summary.md").read_text(), capsys.readouterr().out
    assert "loss 0.5 ± 0.57" in text
    assert "Best: job" not in text
    assert "best)" not in text
    assert not any(job["best"] for job in json.loads((tmp_path / "summary.json").read_text()))
    assert best in text
    assert ("loss, 0.75 ± 0.071 over 2 jobs" in text) == (len(rates) > 1)
    assert f"    python -m trainer predict ckpt={tmp_path}" in out


TABLE, RESUME = "| job |", "To resume: this"
NO_BEST = "There is no best job: no job has a finite value of loss."


@pytest.mark.parametrize(
    ("jobs", "printed"),
    [
        ([], []),
        ([result(0), result(1)], [TABLE]),
        ([result(0, status="interrupted")], [TABLE, RESUME]),
        ([reached(0, None), reached(1, 0.1, status="failed")], [TABLE, NO_BEST]),
        ([reached(0, None, status="failed")], [TABLE]),
        ([reached(0, 1.0), reached(1, 2.0, "max")], [TABLE]),
    ],
)
def test_sweep_without_a_best_job(tmp_path, capsys, jobs, printed):
    report(left(tmp_path, *jobs), again="this")
    file, out = tmp_path / "summary.md", capsys.readouterr().out
    text = (file.read_text() if file.exists() else "") + out
    assert [sentence for sentence in (TABLE, RESUME, NO_BEST, "Best: job") if sentence in text] == printed
    assert bool(out) is bool(printed)


def test_terminal_gets_fewer_columns_than_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.common.terminal.console", lambda: Console(width=110))
    report(left(tmp_path, result(0), result(1)))
    _, _, header, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "job overrides status time test_acc val_acc val_loss skipped memory"
    assert first.split()[:4] == ["0", "optimizer.lr=0", "completed", "61.2"]
    assert second.split()[0] == "1"


def test_only_an_equal_job_that_has_ended_is_done(tmp_path):
    equal = SweepJob(0, tmp_path, [], [], [], cwd=".", digest="a", resumes=True, aside=False)
    write(tmp_path, {"run.json": json.dumps({"status": "completed", "digest": "a"})})
    assert equal.is_done()
    assert not replace(equal, digest="b").is_done()
    assert not replace(equal, resumes=False).is_done()
    write(tmp_path, {"run.json": json.dumps({"status": "interrupted", "digest": "a"})})
    assert not equal.is_done()


def test_job_does_not_resume_from_checkpoints_of_other_values(project, jobs, capsys):
    words = ["fit", "-m", "+recipe=line", "resume=auto", "seed=1,2", "hydra.sweep.dir=jobs"]
    assert main([*words, "optimizer.lr=0.1"]) == 0
    write(project, {f"jobs/{number}/checkpoints/last.ckpt": "" for number in (0, 1)})
    assert main([*words, "optimizer.lr=0.10", "trainer.max_epochs=7"]) == 0  # equal values, and a longer training
    assert len(jobs.started) == 4
    capsys.readouterr()
    assert main([*words, "optimizer.lr=0.1,0.3"]) == 2
    message = "Job 1 is seed=1 optimizer.lr=0.3, but the checkpoints in jobs/1 are of seed=2 optimizer.lr=0.1."
    assert message in capsys.readouterr().err
    assert main([*words[:-1], "hydra.sweep.dir=other", "optimizer.lr=0.1,0.3"]) == 0


def test_each_job_is_a_separate_command(project, jobs, monkeypatch, capsys):
    write(project, {"far/recipe/far.yaml": "# @package _global_\ndefaults: [line]\n"})
    monkeypatch.setenv("LOCAL_RANK", "0")
    flags = ["-m", "--config-dir", "far"]
    assert main(["fit", *flags, "+recipe=far", "precision=16,bf16", "hydra.job.config.override_dirname.kv_sep=-"]) == 0
    commands = [job.command for job in jobs.started]
    assert [command[0] for command in commands] == ["trainer"] * 2
    for number, (command, precision) in enumerate(zip(commands, ["16-mixed", "bf16-mixed"], strict=True)):
        (folder,) = Path("multirun/far").iterdir()
        assert command[1:4] == ["+recipe=far", f"precision={precision}", "command=fit"]
        assert command[-2:] == ["--config-dir", str(project / "far")]
        place = f"hydra.run.dir='{project / folder / str(number)}'"
        assert {place, f"hydra.job.num={number}", f"hydra.job.id={number}", "hydra.mode=RUN"} <= set(command)
        assert main([*command[1:], "--cfg", "job"]) == 0  # it is a command line that is understood
    assert all("LOCAL_RANK" not in job.environment for job in jobs.started)


@pytest.mark.whole
def test_sweep_written_in_a_config(project, jobs):
    """Short names of precisions, in a file of the user."""
    sweep = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      precision: 32,bf16\n"
    write(project, {"conf/sweep/mine.yaml": f"# @package _global_\n{sweep}"})
    assert main(["fit", "+recipe=line", "+sweep=mine", "optimizer.lr=0.1,0.2"]) == 0
    words = [job.command[1:6] for job in jobs.started]
    assert [(word[0], word[2]) for word in words] == [
        ("precision=32-true", "optimizer.lr=0.1"), ("precision=32-true", "optimizer.lr=0.2"),
        ("precision=bf16-mixed", "optimizer.lr=0.1"), ("precision=bf16-mixed", "optimizer.lr=0.2"),
    ]  # fmt: skip
    assert main([*jobs.started[3].command[1:], "--cfg", "job"]) == 0


def test_job_that_crashes_silently_has_failed(project, jobs, monkeypatch):
    statuses = iter([2, -9, -11, -77])

    def ends(job):
        if job.value("seed") in "34":  # a record that the run wrote at its start
            write(job.folder, {"run.json": json.dumps({"status": "running", "metrics": {}, "error": None})})
        return next(statuses)

    monkeypatch.setattr(jobs, "ends", ends)
    assert main(["fit", "-m", "+recipe=line", "seed=1,2,3,4", "hydra.sweep.dir=jobs"]) == 1
    assert [(job["status"], job["error"]) for job in json.loads(Path("jobs/summary.json").read_text())] == [
        ("failed", "exit status 2"),
        ("failed", "ended by SIGKILL, which the system sends when memory runs out"),
        ("failed", "ended by SIGSEGV"),
        ("failed", "ended by signal 77"),
    ]


def test_interrupt_ends_the_sweep_with_its_table(project, jobs, monkeypatch, capsys):
    def ends(job):
        job.returncode = -2
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "ends", ends)
    assert main(["fit", "-m", "+recipe=line", "seed=1,2"]) == 130
    assert len(jobs.started) == 1
    out = capsys.readouterr().out
    assert "Sweep of 1 job" in out
    (folder,) = Path("multirun/line").iterdir()
    assert f"fit --multirun +recipe=line seed=1,2 resume=auto hydra.sweep.dir={folder}" in out
    assert "Job 0 interrupted" not in out  # also in the table
