import io
import json
import math
import re
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from rich.console import Console
from torch import nn

from tests import census
from tests.diagnosis.layers import Amplifier, Huge, Nan, OwnCode, Residual, sequential
from tests.diagnosis.test_replay import Everything, everything
from tests.parity import RecordingLogger
from tests.support import (
    OPTIMIZERS,
    Killed,
    KilledAt,
    Regression,
    assert_identical,
    loader_of,
    loss_of,
    make_batches,
    make_trainer,
    manual_step,
    native_fp16,
)
from trainer.callbacks import OverflowReport, RunSummary, ScaleMonitor
from trainer.errors import LossScaleCollapse
from trainer.precision import MixedPrecision

QUIET = {"after": None, "collapse_after": None, "at_floor": None}


def report_on(folder, module, batches=3, **arguments):
    """Run a fit with skipped steps. Returns the callback and its output."""
    printed = io.StringIO()
    options = {"console": Console(file=printed, width=200)} | arguments.pop("report", {})
    callback = OverflowReport(**options)
    batches = make_batches(batches) if isinstance(batches, int) else batches
    given = {"precision": native_fp16(), "callbacks": [callback, *arguments.pop("callbacks", [])]} | arguments
    make_trainer(folder, **given).fit(module, loader_of(batches))
    return callback, printed.getvalue()


# --- which layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "name", "kind"),
    [
        (Huge(), "net.4' (Huge)", "forward"),
        (Nan(), "net.4' (Nan)", "model"),
        (Residual(nn.Linear(16, 16), Amplifier(), nn.Linear(16, 16)), "net.4.body.1' (Amplifier)", "backward"),
        (OwnCode(forward=False), "net.4' (OwnCode)", "backward"),
    ],
)
def test_layer_is_named(tmp_path, layer, name, kind):
    callback, printed = report_on(tmp_path, Regression(sequential(layer, 4)), 6, accumulate_grad_batches=2)
    (report,) = callback.reports
    assert (report.module, report.kind) == (name.partition("'")[0], kind)
    assert f"'{name}" in report.cause
    assert report.cause in printed
    assert report.remedy in printed


def test_growing_scale_is_no_growing_loss(tmp_path, monkeypatch):
    triggers = []
    monkeypatch.setattr(OverflowReport, "_explain", lambda self, trainer, trigger, *_: triggers.append(trigger))
    scaling = native_fp16(init_scale=2.0, growth_interval=2)  # 1024 times as large after 20 steps
    report_on(tmp_path, Regression(), 24, precision=scaling, log_every_n_steps=20)
    assert triggers == []


@pytest.mark.parametrize(("gain", "number"), [(math.nan, 2), (1e30, 0)])
def test_losses_that_are_not_finite_are_counted_by_themselves(tmp_path, gain, number):
    summary, outcomes, logged = RunSummary(console=Console(file=io.StringIO(), width=200)), [], []
    look = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: outcomes.append(trainer.step_outcome.nonfinite_loss),
        on_train_epoch_end=lambda trainer, _: logged.append(trainer.callback_metrics.get("amp/nonfinite_losses", 0)),
    )
    batches, callbacks = make_batches(6, gains={2: gain, 4: gain}), [summary, ScaleMonitor(), look]
    report_on(tmp_path, Regression(), batches, precision=native_fp16(init_scale=8.0), callbacks=callbacks)
    assert outcomes == [number > 0 and index in (2, 4) for index in range(6)]
    assert logged == [number]
    assert summary.summary["skipped_steps"] == 2
    assert summary.summary.get("nonfinite_losses", 0) == number


class TwoOptimizers(Regression):
    """Two losses and two steps for each batch, in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            manual_step(self, super().training_step(batch, batch_idx), optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=0.01) for weight in (self.net[0].weight, self.net[-1].weight)]


@pytest.mark.parametrize(
    "module", [TwoOptimizers, partial(Regression, optimizer=partial(torch.optim.LBFGS, lr=0.01, max_iter=4))]
)
def test_batch_with_several_losses_is_kept_once(tmp_path, module):
    batches = make_batches(10, gains={1: math.nan})
    callback, _ = report_on(tmp_path, module(), batches, precision="32-true", log_every_n_steps=10)
    (report,) = callback.reports
    assert (report.kind, report.finding.batch_idx) == ("data", 1)


def test_weights_that_are_not_finite(tmp_path):
    module = Regression()
    with torch.no_grad():
        module.net[0].weight[0, 0] = math.nan
    callback, _ = report_on(tmp_path, module)
    assert callback.reports[0].kind == "weights"
    assert "when training began: net.0.weight." in callback.reports[0].cause
    assert callback.reports[0].finding.broken_weights == ["net.0.weight"]


# --- when ---------------------------------------------------------------------------------------------------------


def test_one_report_for_one_cause(tmp_path):
    batches = make_batches(13, gains=dict.fromkeys([1, 2, 4, 5, 6, 7, 9, 10, 11], 1e30))
    callback, printed = report_on(tmp_path, Regression(), batches, precision=native_fp16(init_scale=256.0))
    (report,) = callback.reports
    assert report.kind == "backward"
    assert report.count > 1
    (file,) = tmp_path.glob("*.md")
    assert file.name == f"diagnosis_step_{report.step}.md"
    assert f"| seen | {report.count} times |" in file.read_text()
    assert printed.count("Verdict: ") == 1
    assert len(printed.splitlines()) <= 6


@pytest.mark.parametrize(("options", "step", "in_a_row"), [({"after": 5}, 4, 5), ({"at_step": 1}, 1, 2)])
def test_step_of_the_report(tmp_path, options, step, in_a_row):
    callback, _ = report_on(tmp_path, Regression(sequential(Amplifier(), 3)), 8, report=options)
    assert [(report.step, report.in_a_row) for report in callback.reports] == [(step, in_a_row)]


def test_on_demand(tmp_path):
    given = {"precision": native_fp16(init_scale=256.0), "accumulate_grad_batches": 2, "report": {"at_step": 1}}
    callback, _ = report_on(tmp_path, Regression(), 6, **given)
    (report,) = callback.reports
    assert (report.step, report.in_a_row, report.kind) == (1, 0, "none")
    assert report.finding.largest_scale > 256.0
    assert f"The largest loss scale that fits is {report.finding.largest_scale:g}." in report.cause
    assert (report.module, report.remedy) == (None, "")
    assert (tmp_path / "diagnosis_step_1.md").exists()


def test_more_batches_are_kept_while_steps_are_skipped(tmp_path):
    """The outcome of a step may be known after the forward passes of the next one."""
    room, callback = [], OverflowReport(console=Console(file=io.StringIO()))

    def look(loss, batch_idx):
        room.append(callback._fit.evidence._recent.maxlen)
        return loss.mean()

    batches = make_batches(12, gains={2: 1e30})
    batches[0][2] = torch.ones(2**22)  # 16 MiB
    given = {"precision": native_fp16(init_scale=256.0), "accumulate_grad_batches": 4, "callbacks": [callback]}
    make_trainer(tmp_path, **given).fit(Regression(change=look), loader_of(batches))
    assert room == [0, 3, 3, 3, *[8] * 4, *[3] * 4]


@pytest.mark.parametrize("killed", [None, 2])
def test_everything_is_let_go_of_at_the_end(tmp_path, killed):
    callback = OverflowReport(at_step=7)
    trainer = make_trainer(tmp_path, precision=native_fp16(), callbacks=[callback, KilledAt(killed)])
    with suppress(Killed):
        trainer.fit(Regression(sequential(Amplifier(), 3)), loader_of(make_batches(3)))
    assert (callback._fit, callback._probe, trainer.scaler.before_unscale) == (None, None, [])


# --- the run is the same ------------------------------------------------------------------------------------------


def test_a_run_with_reports_is_the_run_without(tmp_path, late, monkeypatch):
    """Weights, buffers, optimizers, schedules, random numbers, metrics, logs: to the bit."""
    monkeypatch.setattr(Everything, "fused", True)
    seen = {}
    reporting = OverflowReport(at_step=3)
    for name, callback in (("with", reporting), ("without", OverflowReport(**QUIET))):
        torch.manual_seed(3)
        seen[name] = everything(tmp_path / name, Everything(), callback=callback, accumulate_grad_batches=2)
    assert census.differences(seen["with"], seen["without"]) == []
    assert len(reporting.reports) >= 1
    assert [report.finding.error for report in reporting.reports if report.finding.error] == []


# --- the file and the table ---------------------------------------------------------------------------------------


def test_file(tmp_path):
    printed, folder = io.StringIO(), tmp_path / "deep" / "er"
    narrow = Console(file=printed, width=40, force_terminal=True, color_system=None)
    module = Regression(sequential(Amplifier(), 4))
    callback, _ = report_on(tmp_path, module, report={"dirpath": folder, "console": narrow})
    assert f" {folder / 'diagnosis_step_2.md'}\n" in printed.getvalue()  # in one line
    text, (report,) = (folder / "diagnosis_step_2.md").read_text(), callback.reports
    assert text == report.markdown()
    assert text.startswith("# Verdict: backward pass overflows in 16 bits (step 2)\n")
    for line in ("| step | 2, 3 skipped in a row |", "| loss scale | 16384 |", f"- Remedy: {report.remedy}"):
        assert line in text
    facts = json.loads((folder / "diagnosis_step_2.json").read_text())
    assert facts == report.as_dict()
    names = ("verdict", "step", "skipped_in_a_row", "batch_idx", "remedy", "loss_scale")
    assert [facts[name] for name in names] == ["backward", 2, 3, 2, report.remedy, 16384.0]
    assert (facts["place"]["module"], facts["place"]["class"]) == ("net.4", "Amplifier")
    assert facts["figures"]["largest_scale"]["before"] < facts["figures"]["largest_scale"]["after"]
    guide = (Path(__file__).parents[2] / "docs" / "debugging-overflow.md").read_text(encoding="utf-8")
    table = guide.partition("| key | value |")[2]
    for name in (*facts, *facts["place"], *facts["place"]["inputs"]):
        assert f"`{name}`" in table


def test_json_file_has_the_samples_and_numbers_that_are_not_finite_as_text(tmp_path):
    batches = make_batches(4)
    batches[1][0][2, 0] = math.nan
    report_on(tmp_path, Regression(), batches, precision="32-true")
    text = (tmp_path / "diagnosis_step_1.json").read_text()
    facts = json.loads(text, parse_constant=lambda word: pytest.fail(word))  # no JSON has NaN
    assert (facts["verdict"], facts["samples"], facts["loss"]) == ("data", {"batch[0]": [2]}, "nan")
    assert facts["figures"]["loss"]["before"] == "nan"
    assert facts["figures"]["loss"]["after"] > 0


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be written to .*file/diagnosis_step_2.md"):
        _, printed = report_on(tmp_path, Regression(sequential(Nan(), 4)), report={"dirpath": tmp_path / "file"})
    assert "Remedy: " in printed
    assert "Details: " not in printed


def test_fast_dev_run_writes_nothing(tmp_path):
    callback, _ = report_on(tmp_path, Regression(sequential(Nan(), 4)), fast_dev_run=3)
    assert len(callback.reports) == 1
    assert not list(tmp_path.glob("**/*.md"))


# --- collapse -----------------------------------------------------------------------------------------------------


def collapse(folder, module=None, good=2, **arguments):
    """Run some good steps, and overflows after them. Returns the message of the exception."""
    batches = make_batches(80, gains=dict.fromkeys(range(good, 80), 1e30))
    options = {"console": Console(file=io.StringIO())} | arguments.pop("report", {})
    callbacks = [OverflowReport(**options), *arguments.pop("callbacks", [])]
    given = {"precision": native_fp16(init_scale=256.0), "callbacks": callbacks} | arguments
    trainer = make_trainer(folder, **given)
    with pytest.raises(LossScaleCollapse) as caught:
        trainer.fit(module or Regression(), loader_of(batches))
    return str(caught.value), trainer


def test_at_the_floor(tmp_path):
    message, trainer = collapse(tmp_path, Regression(optimizer=OPTIMIZERS["adam-fused"]))
    first, second, *lines = message.splitlines()
    # 256 falls to 1 in 8 skips, and 10 more at 1
    assert first == (
        "18 optimizer steps in a row were skipped, from step 2 to step 19, because gradients were not finite; 10 of"
        " them at the smallest loss scale, min_scale=1."
    )
    assert second == "Loss scale: 256 at step 2, 1 now."
    assert lines[0].startswith("Verdict: backward pass overflows in 16 bits")
    assert any(line.startswith("  Remedy: ") for line in lines)
    assert trainer.global_step == 20
    assert not list(tmp_path.glob("**/*.ckpt"))  # checkpointing is disabled


@pytest.mark.parametrize(("option", "steps"), [({"at_floor": 3}, 11), ({"at_floor": None}, 50)])
def test_its_limits(tmp_path, option, steps):
    assert collapse(tmp_path, report=option)[1].global_step == 2 + steps


def test_it_can_be_switched_off(tmp_path):
    overflows = make_batches(70, gains=dict.fromkeys(range(70), 1e30))
    callback, _ = report_on(tmp_path, Regression(), overflows, precision=native_fp16(init_scale=256.0), report=QUIET)
    assert callback.reports == []


def test_checkpoint_is_the_one_from_before(tmp_path):
    """Saved after the last good step, and saved at the collapse: the same weights, optimizer, schedule, scale."""
    saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    module = Regression(sequential(), OPTIMIZERS["adamw-fused"], partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    message, trainer = collapse(tmp_path, module, good=3, callbacks=[saver], enable_checkpointing=True)
    path = tmp_path / "checkpoints" / "before_collapse.ckpt"
    assert f"are in {path}." in message
    good, kept = (torch.load(p, weights_only=True) for p in (tmp_path / "checkpoints" / "step=3.ckpt", path))
    assert_identical(kept["optimizer_states"], good["optimizer_states"])
    assert kept["lr_schedulers"] == good["lr_schedulers"]
    growth = [(one["MixedPrecision"]["scale"], one["MixedPrecision"]["_growth_tracker"]) for one in (good, kept)]
    assert growth == [(256.0, 3), (256.0, 0)]
    for name, value in good["state_dict"].items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(kept["state_dict"][name], value), name
    # its buffers are those after the first skipped step: one more forward; and so has the module in memory
    (number,) = [name for name in good["state_dict"] if "tracked" in name]
    assert kept["state_dict"][number] == module.state_dict()[number] == good["state_dict"][number] + 1
    assert trainer.scaler.current_scale == 256.0


def test_buffers_that_the_first_skip_has_broken(tmp_path):
    def step(batch, batch_idx):
        factor = 1.0 if batch_idx < 3 else 1e6  # then it overflows the input of the normalization
        return nn.functional.mse_loss(module.net[1:](module.net[0](batch[0]) * factor), batch[1])

    folder, module = tmp_path / "checkpoints", Regression(sequential())
    module.training_step = step
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    message, _ = collapse(tmp_path, module, callbacks=[saver], enable_checkpointing=True)
    assert "These buffers were already non-finite after step 3: net.1.running_mean, net.1.running_var." in message
    assert f"The newest checkpoint from before the first skipped step: {folder / 'step=3.ckpt'}." in message
    assert "Verdict: forward pass overflows in 16 bits" in message


def test_verdict_is_printed_once_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.diagnosis.remedies.is_command_line", lambda: True)
    message, _ = collapse(tmp_path)
    assert (message.count("Verdict: backward pass overflows"), message.count("Remedy")) == (1, 0)


@pytest.mark.parametrize(("scale", "warns"), [(2.0**32, True), (2.0**22, False)])
def test_first_scale_that_is_far_too_large_is_mentioned_once(tmp_path, scale, warns):
    message = r"The first (\d+) optimizer steps .* began at 4.29497e\+09. (\d+) fits: precision=.*init_scale=(\d+)\.0"
    with pytest.warns(UserWarning, match=message) if warns else nullcontext() as caught:
        callback, _ = report_on(tmp_path, Regression(), 24, precision=native_fp16(init_scale=scale))
    assert callback.reports == []
    if warns:
        (warning,) = caught
        skipped, fits, init_scale = re.search(message, str(warning.message)).groups()
        assert int(fits) == int(init_scale) == scale / 2 ** int(skipped)


# --- defaults -----------------------------------------------------------------------------------------------------


def test_replay_that_fails_does_not_end_the_run(tmp_path):
    seen = set()

    def once(loss, batch_idx):
        if batch_idx in seen:
            raise RuntimeError("only once")
        seen.add(batch_idx)
        return loss

    callback, _ = report_on(tmp_path, Regression(sequential(Amplifier(), 4), change=once), 5)
    assert (callback.reports[0].kind, callback.reports[0].remedy) == ("unknown", "")
    assert "ended with RuntimeError: only once" in callback.reports[0].cause


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The outcome of a fused optimizer is late; dropout uses the device's generator."""
    gpu, adam, seen = {"accelerator": "gpu", "devices": 1}, OPTIMIZERS["adam-fused"], []
    module = Regression(sequential(Amplifier(), 4), adam)
    callback, _ = report_on(tmp_path, module, 6, precision=MixedPrecision("float16"), **gpu)
    assert [(report.step, report.module) for report in callback.reports] == [(2, "net.4")]
    for options in ({"at_step": 3}, QUIET):
        module, batches = Regression(sequential(), adam), make_batches(12, gains=dict.fromkeys([2, 4, 5, 6, 7], 1e30))
        torch.manual_seed(3)
        precision = MixedPrecision("float16", init_scale=256.0)
        report_on(tmp_path, module, batches, precision=precision, report=options, **gpu)
        seen.append([*module.state_dict().values(), torch.cuda.get_rng_state().cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


class Logs(Regression):
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := super().training_step(batch, batch_idx))
        return loss


@pytest.mark.gpu
def test_loss_that_is_not_finite_on_a_gpu_is_reported_before_the_row_that_reads_it(tmp_path):
    """Also if the run was resumed between two rows."""
    batches, path = make_batches(12, gains={6: math.nan}), tmp_path / "first.ckpt"
    for steps, given in ((2, {}), (12, {"ckpt_path": path})):
        seen, callback, logger = [], OverflowReport(console=Console(file=io.StringIO())), RecordingLogger()
        logger.log_metrics = lambda metrics, step, seen=seen, callback=callback: seen.append(len(callback.reports))
        options = {"accelerator": "gpu", "devices": 1, "max_steps": steps, "log_every_n_steps": 4, "logger": logger}
        trainer = make_trainer(tmp_path, callbacks=[callback], **options)
        trainer.fit(Logs(), loader_of(batches), **given)
        trainer.save_checkpoint(path)
    assert seen == [0, 1, 1]  # after steps 3, 7 and 11


@pytest.mark.parametrize("every", [50, 0])
def test_loss_that_is_not_finite_in_float32_is_reported_after_its_step(tmp_path, every):
    seen, callback = [], OverflowReport(console=Console(file=io.StringIO()))
    looks = LambdaCallback(on_train_batch_start=lambda *_: seen.append(len(callback.reports)))
    batches = make_batches(8, gains={3: float("nan")})
    trainer = make_trainer(tmp_path, callbacks=[callback, looks], log_every_n_steps=every)
    trainer.fit(Regression(), loader_of(batches))
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1]
    assert callback.reports[0].step == 3


class Draws(Regression):
    """Draws its batches; each may be left out."""

    def training_step(self, dataloader_iter):
        return loss_of(self.net, next(dataloader_iter)[0])


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(
    ("precision", "gains", "lr", "kind", "parts"),
    [
        ("32-true", {3: math.nan}, 0.01, "unknown", ["A loss was not finite at step 3.", "draws its own batches"]),
        (native_fp16(), {3: math.nan}, 0.01, "unknown", ["A loss was not finite at step 3.", "draws its own batches"]),
        ("32-true", None, 20.0, "divergence", ["The steps make the loss grow without bound: the learning rate is 20."]),
    ],
)
def test_step_that_draws_its_batches_is_not_repeated(tmp_path, precision, gains, lr, kind, parts):
    module = Draws(optimizer=lambda parameters: torch.optim.SGD(parameters, lr))
    callback, printed = report_on(tmp_path, module, make_batches(30, gains=gains), precision=precision)
    (report,) = callback.reports
    assert report.kind == kind
    for part in parts:
        assert part in printed
    assert "iterator" not in printed
