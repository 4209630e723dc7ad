"""``compare``: the commands of its jobs, the report on their records, and the exit status."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cli.compare.test_verdict import labeled
from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.compare import Comparison, Thresholds, condition_differences, read_runs, report
from trainer.common.terminal import QUIET
from trainer.record.run_record import load_run

BATCHES = [[1, 2], [3, 4], [5, 6]]
LINE = ["+recipe=line", "callbacks=none", "logger=none", "trainer.enable_checkpointing=false"]


def result(job, precision, **more):
    usual = {
        "job": job,
        "overrides": ["+recipe=a", f"precision={precision}", "command=compare"],
        "recipe": "a",
        "precision": precision,
        "seed": 42,
        "devices": "1 x NVIDIA A100",
        "run_dir": str(job),
        "status": "completed",
        "epochs": 3,
        "steps": 60,
        "skipped_steps": job,
        "peak_memory": {"gpu": 2**31 - job * 2**29},
        "metrics": {"val_acc": 0.9 + job / 1000, "val_loss": 0.1},
        "curves": {"losses": {"steps": [1, 2], "values": [2.0, 0.5]}},
        "samples_per_second": 1000.0 + 600 * job,
        "train_seconds": 61.25,
        "throughput": {"measured_batches": 50, "waiting": 0.01, "batches": BATCHES},
    }
    return usual | more


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave(*results):
    for each in results:
        write(Path(each["run_dir"]), {"run.json": json.dumps(each)})
    return read_runs(Path())


def test_report(folder, capsys, monkeypatch):
    leave(result(0, "32-true"), result(1, "16-mixed"))
    assert report(folder, Thresholds(), ["+recipe=a", "precision=32-true,16-mixed", "hydra.sweep.dir='x y'"]) == 0
    text = (folder / "compare.md").read_text()
    assert text.startswith(
        "# a: 32-true, 16-mixed\n\n    python -m trainer compare +recipe=a precision=32-true,16-mixed\n\n"
        "| run | final loss | val_acc | training | samples/s | peak memory | skipped | speed-up | memory | verdict |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 32-true | 0.5 | 0.9 | 61.2 s | 1,000 | 2,048 MiB | 0 | - | - | - |\n"
        "| 16-mixed | 0.5 | 0.901 | 61.2 s | 1,600 | 1,536 MiB | 1 | 1.60x | -25% | missed |\n"
    )
    verdict = "val_acc within 0.1 points of 32-true, 1.60x faster, 25.0% less memory."
    assert f"- 16-mixed: {verdict}\n  - Saves less than 30% of the memory. Mixed precision keeps" in text
    assert "- Equal in all runs: seed 42, devices 1 x NVIDIA A100, epochs 3, steps 60, the first batch " in text
    assert "\n- Each setting has only one run" in text
    out = capsys.readouterr().out
    assert f"16-mixed: {verdict}\n  - Saves less" in out
    end = f"The report is {folder / 'compare.md'}\n"
    assert out.endswith(end)

    numbers = json.loads((folder / "compare.json").read_text())
    assert (numbers["metric"], numbers["thresholds"]["strict"]) == ("val_acc", False)
    first, second = numbers["runs"]
    assert first["verdict"] is None
    assert (second["label"], second["metric"], second["final_loss"]) == ("16-mixed", 0.901, 0.5)
    assert {"speedup": 1.6, "memory_saving": 0.25, "met": False}.items() <= second["verdict"].items()

    monkeypatch.setenv(QUIET, "1")
    report(folder, Thresholds())
    assert capsys.readouterr().out == f"16-mixed: {verdict}\n{end}"


def test_missed_threshold_fails_with_strict_only(folder):
    leave(result(0, "32-true"), result(1, "16-mixed"), result(2, "bf16-mixed"))  # 25% and 50.0% less memory
    assert report(folder, Thresholds()) == 0
    assert report(folder, Thresholds(strict=True)) == 1
    assert report(folder, Thresholds(strict=True, min_speedup=3.0)) == 2
    assert report(folder, Thresholds(strict=True, min_memory_saving=None)) == 0


NOTHING = {"throughput": None, "samples_per_second": None, "metrics": {}}
COLLAPSE = {"status": "failed", "error": "LossScaleCollapse: [b]1[/b]"} | NOTHING
FIRST, SECOND, THIRD = result(0, "32-true"), result(1, "16-mixed"), result(2, "bf16-mixed")
FAILED = FIRST | {"status": "failed", "error": "OSError: no"}


@pytest.mark.parametrize(
    ("jobs", "status", "sentences"),
    [
        ([], 0, []),
        ([FIRST], 0, ["32-true: there is no other run to compare with."]),
        ([FIRST, SECOND | {"status": "interrupted"}], 1, ["16-mixed: interrupted: no error was recorded"]),
        ([FAILED, SECOND], 1, ["32-true: failed: OSError: no", "16-mixed: completed, but 32-true did not."]),
        ([FIRST, SECOND | COLLAPSE, THIRD], 1, ["failed: LossScaleCollapse: [b]1[/b]\n", "bf16-mixed: val_acc within"]),
    ],
)
def test_runs_that_did_not_complete(folder, capsys, jobs, status, sentences):
    leave(*jobs)
    assert report(folder, Thresholds()) == status
    assert (folder / "compare.md").exists() is bool(jobs)
    for text in (capsys.readouterr().out, (folder / "compare.md").read_text() if jobs else ""):
        assert [sentence in text for sentence in sentences] == [True] * len(sentences), text


def test_runs_of_a_comparison(folder):
    """They are labeled by their differences, and those of an earlier comparison in the same folder are left out."""
    auto = result(1, "auto") | {"precision": "bf16-mixed"}
    assert [run.label for run in leave(result(0, "32-true"), auto)] == ["32-true", "auto (bf16-mixed)"]
    os.utime("1/run.json", (1000.0, 1000.0))
    assert [run.label for run in read_runs(folder, since=2000.0)] == ["32-true"]


def runs(**of_second):
    first, second = result(0, "32-true"), result(1, "16-mixed", **of_second)
    return [labeled(label, facts) for label, facts in (("32-true", first), ("16-mixed", second))]


@pytest.mark.parametrize(
    ("of_second", "sentence"),
    [
        ({"throughput": None}, "devices 1 x NVIDIA A100, epochs 3, steps 60."),  # nothing is known of the batches
        ({"seed": 7}, "Different between runs: 16-mixed has seed 7, 32-true 42."),
        ({"epochs": 1}, "16-mixed has epochs 1, 32-true 3."),
        ({"throughput": {"batches": [[None, 2], [None, 4], [5, 6]]}}, "Equal in all runs: "),
        ({"throughput": {"batches": [[None, 2], [None, 5], [5, 6]]}}, "different batches from epoch 2 "),
    ],
)
def test_conditions_that_differ(of_second, sentence):
    (found,) = condition_differences(runs(**of_second))
    assert sentence in found


def test_conditions():
    different = Comparison(runs(seed=7, devices="1 x CPU"), Thresholds()).conditions
    assert [line.startswith("Different between runs") for line in different] == [True, False, False]
    assert condition_differences(runs(status="failed", seed=7)) == []
    few = {"throughput": result(0, "")["throughput"] | {"measured_batches": 5}}
    assert "The rates were measured over too few batches (5)." in Comparison(runs(**few), Thresholds()).conditions[1]
    on_cpu = labeled("32-true", result(0, "32-true", peak_memory={"process": 2**30}))
    (hint,) = [line for line in Comparison([on_cpu] * 2, Thresholds()).conditions if "CPU" in line]
    assert "not expected to be faster" in hint


def test_one_job_for_each_precision(jobs, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "ends", lambda job: result(0, job.value("precision"), run_dir=str(job.folder)))
    assert main(["compare", "+recipe=line", "compare.min_memory_saving=null", "optimizer.lr=0.2"]) == 0
    assert [job.value("precision") for job in jobs.started] == ["32-true", "16-mixed", "bf16-mixed"]
    measured = "++callbacks.throughput._target_=trainer.callbacks.Throughput"
    assert all({"command=fit", "hydra.mode=RUN", measured} <= set(job.command) for job in jobs.started)
    (folder,) = Path("multirun/line").iterdir()
    assert {"compare.md", "compare.json"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "summary.md").exists()
    command = "compare +recipe=line compare.min_memory_saving=null optimizer.lr=0.2 precision=32-true,16-mixed,"
    assert f"    python -m trainer {command}bf16-mixed\n" in (folder / "compare.md").read_text()
    out = capsys.readouterr().out
    assert "Job 1: +recipe=line compare.min_memory_saving=null optimizer.lr=0.2 precision=16-mixed, " in out
    # the command line of a job is valid
    assert main([*jobs.started[1].command[1:], "--cfg", "job"]) == 0
    assert main(["compare", "+recipe=line", "precision=32,16", "compare.strict=true"]) == 1  # as fast, as much memory


@pytest.mark.gpu(simulated=False)  # processes with their own memory
@pytest.mark.whole
def test_real_trainings_on_a_gpu(project, python):
    done = python.trainer("compare", *LINE, "trainer=gpu", "precision=32,16", "hydra.sweep.dir=jobs")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(Path("jobs/compare.json").read_text())
    assert [list(run["peak_memory"]) for run in numbers["runs"]] == [["gpu"], ["gpu"]]
    assert numbers["runs"][1]["verdict"]["met"] is False  # a line has nothing for Tensor Cores to do
    assert tuple(load_run(Path("jobs/0")).gpu["capability"]) == torch.cuda.get_device_capability()
    assert "memory" in numbers["runs"][1]["verdict"]["text"]
