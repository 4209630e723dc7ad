"""Runs in this process: results, files, and errors."""

import json
import os
import re
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from trainer import Trainer
from trainer.cli import main
from trainer.diagnosis.remedies import is_command_line

pytestmark = [
    pytest.mark.usefixtures("project"),
    pytest.mark.filterwarnings("default"),  # Lightning warns of tiny data and few workers
]

LINE = ["+recipe=line", "callbacks.learning_rate_monitor=null"]


def only(pattern):
    (found,) = Path().glob(pattern)
    return found


def result(folder=None):
    return json.loads(((folder or only("outputs/*/*")) / "run.json").read_text())


def test_only_the_runs_of_a_command_get_remedies_for_the_command_line(project, monkeypatch):
    during = []
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: during.append(is_command_line()))
    main(["fit", *LINE])
    assert (during, is_command_line()) == ([True], False)


def test_fit_writes_everything_into_the_runs_folder(project):
    assert main(["fit", *LINE, "trainer.max_epochs=3", "seed=3"]) == 0
    folder = only("outputs/line/*")
    assert {"run.json", "checkpoints", ".hydra", "csv"} <= {file.name for file in folder.iterdir()}
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert result()["environment"]["directory"] == str(project)
    overrides = [*LINE, "trainer.max_epochs=3", "seed=3", "command=fit"]
    assert (folder / ".hydra" / "overrides.yaml").read_text().splitlines() == [f"- {word}" for word in overrides]
    record = result()
    expected = {
        "status": "completed", "command": "fit", "recipe": "line", "precision": "32-true", "seed": 3, "epochs": 3,
        "steps": 12, "skipped_steps": 0, "scale": None, "devices": "1 x CPU", "gpu": None,
        "monitor": {"metric": "val_loss", "mode": "min"},
    }  # fmt: skip
    assert expected.items() <= record.items()
    assert torch.initial_seed() == 3
    assert 0 < record["metrics"]["val_loss"] < 1.5
    assert record["peak_memory"]["process"] > 2**20
    assert {file.name for file in project.iterdir()} - {"__pycache__"} == {"conf", "line_fit.py", "outputs"}


SKIPPED = ["precision=16", "precision.init_scale=1e30", "trainer.max_epochs=1"]  # in float16 every gradient is infinite


def test_run_with_only_skipped_steps_has_failed(capsys):
    assert main(["fit", *LINE, *SKIPPED, "objective.metric=val_loss"]) == 1
    record, output = result(), capsys.readouterr()
    assert (record["status"], record["steps"], record["skipped_steps"]) == ("failed", 4, 4)
    assert record["error"].startswith("TrainerError: No weight was updated: all 4 optimizer steps were skipped")
    assert "precision.init_scale=6.25e+28" in record["error"]
    assert "completed" not in output.out
    assert output.err.count("No weight was updated") == 1
    assert (only("outputs/*/*") / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize("few", ["+debug=fast_dev_run", "trainer.limit_train_batches=2"])
def test_trial_run_may_skip_its_steps(few):
    assert main(["fit", *LINE, *SKIPPED, few]) == 0


def test_auto_reports_the_selected_precision(monkeypatch, capsys):
    from trainer.precision import auto

    monkeypatch.setattr(auto, "native_bfloat16", lambda device: True)
    assert main(["fit", *LINE, "logger=none", "precision=auto", "hydra.run.dir=run"]) == 0
    assert result(Path("run"))["precision"] == "bf16-mixed"
    assert "precision='auto' is bf16-mixed here: this CPU computes" in Path("run/fit.log").read_text()
    assert "precision='auto' is bf16-mixed here: this CPU computes in bfloat16 natively." in capsys.readouterr().err


def test_command_line_of_child_ranks_is_unchanged():
    words = ["+recipe=line", "logger=none", "command=fit", 'hydra.run.dir="given folder"', "hydra.job.name=train_1"]
    assert main([*words, "hydra.output_subdir=null"]) == 0
    assert result(Path("given folder"))["status"] == "completed"
    assert not Path("given folder/.hydra").exists()


def test_predict_uses_a_checkpoint(given):
    """As the other commands do in test_restore.py."""
    words = ["logger=none", "ckpt_path=given/checkpoints/last.ckpt", "hydra.run.dir=predicted"]
    assert main(["predict", *LINE, *words]) == 0
    trained = torch.load("given/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    points = torch.linspace(-1, 1, 16).unsqueeze(1)
    predictions = torch.cat(torch.load("predicted/predictions.pt", weights_only=True))
    torch.testing.assert_close(predictions, points @ trained["net.weight"].T + trained["net.bias"])


def test_error_in_a_run_is_a_paragraph_and_its_traceback_is_in_the_log(capsys):
    assert main(["fit", *LINE, "model.fail_at=2", "hydra.run.dir=run"]) == 1
    assert capsys.readouterr().err == (
        "trainer: RuntimeError: asked to fail\n"
        '  Raised in line_fit.py:23, in training_step: raise RuntimeError("asked to fail")\n'
        f"  The full traceback is in {Path('run', 'fit.log')}; --debug prints it.\n"
    )
    logged = Path("run/fit.log").read_text()
    assert "Traceback (most recent call last):" in logged
    assert logged.rstrip().endswith("RuntimeError: asked to fail")
    record = result(Path("run"))
    assert (record["status"], record["error"], record["steps"]) == ("failed", "RuntimeError: asked to fail", 2)
    assert main(["fit", *LINE, "model.fail_at=0", "--debug"]) == 1
    err = capsys.readouterr().err
    assert 'line_fit.py", line 23, in training_step' in err
    assert "trainer: RuntimeError: asked to fail\n" in err
    assert "hydra/_internal" not in err
    assert "TRAINER_DEBUG" not in os.environ


def test_missing_method_of_the_module_is_a_usage_error(project, capsys):
    text = (project / "line_fit.py").read_text().replace("def training_step(", "def other_step(")
    (project / "line_fit.py").write_text(text)
    assert main(["fit", *LINE, "logger=none"]) == 2
    assert "No `training_step()` method defined" in capsys.readouterr().err


def test_interpolations_are_settings(monkeypatch):
    monkeypatch.setenv("RATE", "0.0123")
    settings = ['optimizer.lr="${oc.decode:${oc.env:RATE}}"', "model.start=${.fail_at}", "model.fail_at=99"]
    assert main(["fit", *LINE, "logger=none", *settings, "hydra.run.dir=run"]) == 0
    assert set(settings) <= set(result(Path("run"))["overrides"])
    assert main(["test", "ckpt=run", "model.start=${..data.batch_size}"]) == 0


@pytest.mark.whole
@pytest.mark.parametrize("command", ["fit", "test"])
def test_last_checkpoint_has_to_exist(command, capsys):
    assert main([command, *LINE, "logger=none", "ckpt_path=last", "hydra.run.dir=run"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"ckpt_path is last, and there is no last checkpoint in any folder of this run\. ", err)
    assert f"python -m trainer {command} ckpt=RUN" in err
    assert main(["fit", *LINE, "logger=none", "hydra.run.dir=run"]) == 0
    with pytest.warns(UserWarning, match="exists and is not empty") if command == "fit" else nullcontext():
        assert main([command, *LINE, "logger=none", "ckpt_path=last", "hydra.run.dir=run"]) == 0


def test_out_of_memory_error_is_reported_and_recorded(capsys, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(torch.nn.functional, "mse_loss", Mock(side_effect=error))
    assert main(["fit", *LINE, "trainer.num_sanity_val_steps=0", "logger=none", "hydra.run.dir=run"]) == 1
    err = capsys.readouterr().err
    assert err.count("Memory ran out") == err.count("Live tensors: weights 8 bytes, ") == 1
    assert "in the forward pass." in err
    assert "accumulate_grad_batches" in err
    assert "tune batch_size finds the largest." in err
    found = result(Path("run"))
    assert found["status"] == "failed"
    assert (found["out_of_memory"]["weights"], found["out_of_memory"]["gradients"]) == (8, 0)


QUIET = ["trainer.enable_progress_bar=true", "trainer.enable_model_summary=true", "hydra.run.dir=run"]


def test_quiet_leaves_one_line(capfd):
    assert main(["fit", *LINE, *QUIET, "-q", "precision=16", "trainer.max_epochs=5"]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(r"fit completed in \d+\.\d s: val_loss=[\d.]+\. Results are in run\n", out)
    assert err == ""
    assert json.loads(Path("run/run.json").read_text())["steps"] == 20


def test_quiet_still_warns_and_shows_no_table(capfd):
    assert main(["test", *LINE, *QUIET, "-q"]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(r"test completed in \d+\.\d s: test_loss=1\.511\. Results are in run\n", out)
    assert "WARNING: test uses newly initialized weights" in err


def test_dropped_callback_that_a_recipe_configures_stays_away():
    settings = ["callbacks=none", "++callbacks.model_checkpoint.save_top_k=3", "logger=none"]
    assert main(["fit", "+recipe=line", *settings, "trainer.enable_checkpointing=false"]) == 0
    assert not list(Path().glob("outputs/*/*/checkpoints"))


SETTINGS = [
    ({"val_check_interval": "{minutes: 10}"}, lambda trainer: trainer.loop.limits.val_check_seconds == 600),
    ({"profiler": "simple"}, lambda trainer: isinstance(trainer.profiler, SimpleProfiler)),
    ({"barebones": "true", "log_every_n_steps": "5"}, lambda trainer: trainer.barebones and not trainer.loggers),
]


@pytest.mark.parametrize(("settings", "holds"), SETTINGS, ids=lambda s: " ".join(s) if isinstance(s, dict) else "")
def test_setting_reaches_the_trainer(project, monkeypatch, settings, holds):
    built = []
    monkeypatch.setattr("trainer.cli.execution._execute", lambda *parts: built.append(parts[-1]))
    assert main(["fit", *LINE, *(f"trainer.{name}={value}" for name, value in settings.items())]) == 0
    assert holds(*built)


def test_messages_of_lightning_are_in_the_log_only(project, capfd):
    assert main(["fit", *LINE, "trainer.profiler=simple"]) == 0
    log, output = only("outputs/line/*") / "fit.log", capfd.readouterr()
    assert "GPU available" not in output.err
    assert "GPU available" in log.read_text()
    assert "Profiler Report" not in output.out + output.err
    assert f"The profile is in {log}." in output.out
    assert "FIT Profiler Report" in log.read_text()


def test_output_without_a_terminal_is_plain(project, monkeypatch, capfd):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["fit", *LINE, "trainer.enable_progress_bar=true", "trainer.enable_model_summary=true"]) == 0
    assert main(["test", *LINE, "trainer.enable_progress_bar=true"]) == 0
    out = "".join(capfd.readouterr())
    assert "fit completed" in out
    assert not re.search(r"[\x1b\r]", out)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there are no such pipes")
def test_run_reports_a_closed_output_pipe(python):
    reads, writes = os.pipe()
    os.close(reads)
    words = ["-m", "trainer", "fit", *LINE, *QUIET]
    with python.start(*words, stdout=writes, stderr=subprocess.PIPE, text=True) as process:
        os.close(writes)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    for text in (err, Path("run/fit.log").read_text()):
        assert "The output pipe was closed" in text
    assert result(Path("run"))["status"] == "interrupted"
