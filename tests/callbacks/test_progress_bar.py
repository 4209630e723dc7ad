import io
import itertools
import logging
import re
import sys
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from rich.console import Console

from tests.support import BOTH_TRAINERS, FakeTrainer, make_trainer
from trainer.callbacks.progress_bar import ProgressBar


class Terminal(io.StringIO):
    """A slow terminal."""

    def __init__(self, clock, seconds_per_write=0.0):
        super().__init__()
        self.clock = clock
        self.seconds_per_write = seconds_per_write

    def isatty(self):
        return True

    def write(self, text):
        self.clock.now += self.seconds_per_write
        return super().write(text)


class Fake(FakeTrainer):
    """A run of three epochs with batches of 20 ms, a logged loss, and a loss scale unless disabled."""

    def __init__(self, bar, clock, scaler=True, **values):
        usual = {"seconds": 0.02, "max_epochs": 3, "scale": 32768.0 if scaler else None}
        super().__init__(bar, clock=clock, **(usual | values))
        self.bar = bar
        self.progress_bar_metrics = {"train_loss": torch.tensor(0.25)}
        self.state.stage = RunningStage.TRAINING
        bar.setup(self, None, "fit")

    def evaluate(self, stage="validation", ends=False, **options):
        stages = {"validation": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}
        self.state.stage = RunningStage["SANITY_CHECKING" if self.sanity_checking else stages[stage]]
        super().evaluate(stage, ends=ends, **options)

    def fit(self):
        self.hook("on_train_start")
        for _ in range(self.max_epochs):
            self.train_epoch()
            self.evaluate(ends=True, val_acc=0.95)
            self.end_epoch()
        self.hook("on_train_end")


def started(bar, clock, **values):
    """Return a run that has begun to train."""
    trainer = Fake(bar, clock, **values)
    bar.on_train_start(trainer, None)
    return trainer


CONSOLES = WeakKeyDictionary()
"""The console of each bar."""


def on(console, **options):
    bar = ProgressBar(console=console, **options)
    CONSOLES[bar] = console
    return bar


def on_lines(**options):
    return on(Console(file=io.StringIO(), width=80), **options)


def on_terminal(clock, seconds_per_write=0.0, width=120, **options):
    file = Terminal(clock, seconds_per_write)
    console = Console(file=file, force_terminal=True, width=width, color_system=None, _environ={})
    return on(console, **{"refresh_rate": 0.1, **options})


def written(bar):
    return CONSOLES[bar].file.getvalue()


def frames(bar):
    """Return each state of the live display as plain text."""
    drawn = re.split(r"(?:\r?\x1b\[\dK|\x1b\[1A|\r)+", written(bar))
    text = [re.sub(r"\x1b\[\?*[\d;]*[a-zA-Z]", "", frame) for frame in drawn]
    return [frame for frame in text if frame.strip()]


# Plain lines


def test_line_every_so_often_in_a_long_epoch(clock):
    bar = on_lines(seconds_between_lines=30)
    trainer = started(bar, clock, seconds=1.0, batches=100, max_epochs=12, scaler=False)
    trainer.train_epoch()
    trainer.end_epoch()
    assert written(bar).splitlines() == [
        f"epoch  1/12  batch {batch:3}/100  train_loss 0.2500  1.0 it/s" for batch in (30, 60, 90, 100)
    ]


def test_rate_leaves_validation_out(clock):
    bar = on_lines(seconds_between_lines=1000)
    trainer = started(bar, clock, seconds=0.5, scaler=False)
    trainer.train_epoch(last=2)
    trainer.evaluate()
    clock.now += 60
    bar.on_validation_end(trainer, None)
    trainer.train_batch(2)
    trainer.train_batch(3)
    trainer.end_epoch()
    assert written(bar) == "epoch 1/3  batch 4/4  train_loss 0.2500  2.0 it/s\n"


def test_loss_that_the_next_step_writes_over_is_shown_as_it_was(clock):
    bar, of_a_cuda_graph = on_lines(), torch.tensor(0.5)
    trainer = started(bar, clock, scaler=False)
    trainer.progress_bar_metrics = {}
    trainer.train_epoch(outputs={"loss": of_a_cuda_graph})
    of_a_cuda_graph.fill_(7.0)  # for example by a validation
    trainer.end_epoch()
    assert "loss 0.5000" in written(bar)


def test_log_file_gets_one_line_per_epoch_although_color_is_forced(clock, capsys, monkeypatch):
    monkeypatch.setattr("trainer.callbacks.progress_bar.get_console", lambda: Console(_environ={"FORCE_COLOR": "1"}))
    trainer = Fake(ProgressBar(), clock)
    trainer.progress.skipped_steps = 1
    trainer.fit()
    rest = "batch 4/4  train_loss 0.2500  val_acc 0.9500  scale 32768  skipped 1  50.0 it/s"
    assert capsys.readouterr().out.splitlines() == [f"epoch {epoch}/3  {rest}" for epoch in (1, 2, 3)]


# The live bar


def test_live_bar_shows_everything(clock):
    bar = on_terminal(clock)
    trainer = started(bar, clock)
    trainer.progress.skipped_steps = 2
    trainer.progress_bar_metrics["lr"] = 1e-5
    trainer.train_epoch(last=1)
    clock.now += 1
    trainer.train_batch(1)
    bar.on_train_end(trainer, None)
    first, second = frames(bar)[-1].splitlines()
    assert re.fullmatch(r"epoch 1/3   ━+[╸╺]? *  2/4 {4}1\.9 it/s  eta 0:00:01", first.rstrip()), first
    assert second.split("  ")[-5:-1] == ["train_loss 0.2500", "lr 1.000e-05", "scale 32768", "skipped 2"]
    assert len(first) == 120  # the bar is padded, so that text after it does not move


def test_validation_has_its_own_bar(clock):
    bar = on_terminal(clock)
    trainer = started(bar, clock, seconds=0.2, num_val_batches=[4, 7])
    trainer.train_epoch()
    trainer.evaluate(batches=3, dataloader_idx=1)
    train, validation, _ = frames(bar)[-1].splitlines()
    assert re.match(r"epoch 1/3 .* 4/4 ", train)
    assert re.match(r"validation 1 .* 3/7  .* 5\.0 it/s", validation)
    bar.on_validation_end(trainer, None)
    bar.on_train_end(trainer, None)
    assert "validation" not in frames(bar)[-1]


def test_sanity_check_and_evaluation(clock):
    bar, stdout = on_terminal(clock), sys.stdout
    trainer = Fake(bar, clock, seconds=0.2)
    bar.on_sanity_check_start(trainer, None)
    trainer.sanity_checking = True
    trainer.evaluate(batches=1)
    assert re.match("sanity checking .* 1/1 ", frames(bar)[-1])
    bar.on_validation_end(trainer, None)
    trainer.sanity_checking = False
    bar.on_train_start(trainer, None)
    assert re.match("(?s)epoch 1/3 (?!.*sanity)", frames(bar)[-1])
    bar.on_train_end(trainer, None)
    trainer.state.fn = TrainerFn.TESTING
    trainer.evaluate("test", ends=True)
    assert re.match("testing  .* 4/4 ", frames(bar)[-1])
    assert_given_back(bar, stdout)


def test_refreshes_are_bounded_by_the_period(clock):
    reads = []

    bar = ProgressBar(refresh_rate=0.1, console=Console(file=io.StringIO(), force_terminal=True))
    bar.get_metrics = lambda *_: reads.append(clock.now) or {}
    # 1000 epochs of 3 batches of 1 ms: 3 seconds.
    Fake(bar, clock, seconds=0.001, batches=3, max_epochs=1000).fit()
    assert 25 < len(reads) <= 62  # validation takes another 3 seconds, and reads nothing
    assert min(after - before for before, after in itertools.pairwise(reads[:-1])) > 0.099


def test_slow_terminal_is_written_to_less_often(clock):
    bar = on_terminal(clock, seconds_per_write=0.05)
    trainer = started(bar, clock, seconds=0.01, batches=2000)
    began, before = clock.now, len(written(bar))
    trainer.train_epoch(last=1000)
    assert len(written(bar)) > before
    assert 0 < clock.now - began - 1000 * 0.01 <= 0.03 * 1000 * 0.01
    bar.teardown(trainer, None, "fit")


def test_unknown_total_has_no_eta(clock):
    bar = on_terminal(clock)
    trainer = started(bar, clock, seconds=0.2, batches=float("inf"), max_epochs=-1)
    trainer.train_epoch(last=3)
    assert re.match(r"epoch 1 .*━  3 +5\.0 it/s(?!.*eta)", frames(bar)[-1])
    bar.teardown(trainer, None, "fit")


def test_narrow_terminal(clock):
    bar = on_terminal(clock, width=30)
    Fake(bar, clock).fit()
    assert all(len(line) <= 30 for frame in frames(bar) for line in frame.splitlines())


def test_leave_keeps_a_line_for_each_epoch(clock):
    bar = on_terminal(clock, leave=True)
    Fake(bar, clock, max_epochs=2).fit()
    for epoch in (1, 2):
        assert f"epoch {epoch}/2  batch 4/4  train_loss 0.2500  val_acc 0.9500" in written(bar)


# Output of the user


def assert_given_back(bar, stdout):
    assert sys.stdout is stdout
    assert written(bar).rstrip().endswith("\x1b[?25h")  # the cursor
    before = written(bar)
    CONSOLES[bar].print("next")
    assert written(bar)[len(before) :] == "next\n"


@pytest.mark.parametrize("stop", ["on_exception", "teardown", "disable"])
def test_terminal_is_restored_after_an_error(clock, stop):
    stdout = sys.stdout
    bar = on_terminal(clock)
    trainer = started(bar, clock)
    trainer.train_epoch(last=2)
    assert sys.stdout is not stdout
    arguments = {"on_exception": (trainer, None, KeyboardInterrupt()), "teardown": (trainer, None, "fit")}
    getattr(bar, stop)(*arguments.get(stop, ()))
    assert_given_back(bar, stdout)
    trainer.train_batch(2)  # nothing is drawn any more
    assert written(bar).endswith("next\n")


def test_prints_and_log_records_are_above_the_bar(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(clock))
    logger, handler = logging.getLogger("test_progress_bar"), logging.StreamHandler()  # has the current stderr
    monkeypatch.setattr(logger, "handlers", [handler])
    bar = on_terminal(clock)
    trainer = started(bar, clock)
    print("a user's line")
    bar.print("a module's", "line", sep=" ")
    logger.warning("a log record")
    sys.stderr.write("a warning\n")
    for text in ("a user's line", "a module's line", "a log record", "a warning"):
        (frame,) = [frame for frame in frames(bar) if text in frame]
        assert re.match(rf"{text} *\n+epoch 1/3 ", frame), frame
    bar.on_train_end(trainer, None)
    assert handler.stream is stderr
    logger.warning("afterwards")
    assert stderr.getvalue() == "afterwards\n"


def test_redirected_stderr_stays_redirected(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    bar = on_terminal(clock)
    trainer = started(bar, clock)
    sys.stderr.write("an error\n")
    bar.teardown(trainer, None, "fit")
    assert stderr.getvalue() == "an error\n"
    assert "an error" not in written(bar)


# Lightning's interface


def test_notebook_has_a_bar(clock, monkeypatch):
    outputs = []  # of a notebook's cell

    def display(shown, display_id):
        outputs.append([])
        output = SimpleNamespace(update=lambda shown: outputs[-1].append(shown._repr_mimebundle_((), ())))
        output.update(shown)
        return display_id and output

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich._console", Console(force_jupyter=True, width=100, _environ={}))
    bar = ProgressBar(refresh_rate=0.1)
    trainer = Fake(bar, clock, seconds=0.2)
    trainer.progress.skipped_steps = 2
    trainer.fit()
    trainer.state.fn, trainer.state.stage = TrainerFn.VALIDATING, RunningStage.VALIDATING
    bar.on_validation_start(trainer, None)
    trainer.evaluate(batches=3, ends=True)
    fit, validation = outputs  # each replaces the display
    assert len(fit) > 6
    plain = re.sub(r"\x1b\[[\d;]*m", "", fit[-1]["text/plain"])
    assert re.match(r"epoch 3/3   ━+  4/4 {4}5\.0 it/s *\n.*skipped ", plain), plain
    assert re.match("(?s)<pre .*epoch 3/3", fit[-1]["text/html"])
    assert "#000000" not in fit[-1]["text/html"]  # on a dark page it would not be seen
    assert "validation" in validation[-1]["text/html"]


def test_switched_off(clock):
    bar = on_lines()
    bar.disable()
    for off in (bar, on_lines(refresh_rate=0), on_terminal(clock, refresh_rate=0)):
        assert off.is_disabled
        Fake(off, clock).fit()
        assert written(off) == ""
    bar.enable()
    assert (bar.is_enabled, bar.refresh_rate) == (True, 0.2)
    Fake(bar, clock).fit()
    assert written(bar).count("\n") == 3


def test_get_metrics_may_be_overridden(clock):
    bar = on_lines()
    bar.get_metrics = lambda *_: {"loss": torch.tensor(1.5), "note": "[b]good[/b]", "count": 3}
    Fake(bar, clock, max_epochs=1, scaler=False).fit()
    assert written(bar) == "epoch 1/1  batch 4/4  loss 1.500  note [b]good[/b]  count 3  50.0 it/s\n"


# With a real trainer


class Module(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("acc", 0.5, prog_bar=True)
        if batch_idx == 1:
            self.print("a module's line")
        return {"loss": self.step(batch) * 0 + 2.0}

    def validation_step(self, batch, batch_idx):
        self.step(batch)
        self.log("val_acc", 0.25, prog_bar=True)


@BOTH_TRAINERS
def test_real_runs_on_lines(tmp_path, trainer_class, capsys):
    bar, module, limits = on_lines(), Module(), {"max_epochs": 2, "limit_train_batches": 3}
    limits |= dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 2)
    trainer = make_trainer(tmp_path, trainer_class, callbacks=[bar], enable_progress_bar=True, **limits)
    assert trainer.progress_bar_callback is bar
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    assert re.sub(r"  [\d.]+ it/s", "", written(bar)).splitlines() == [
        *(f"epoch {epoch}/2  batch 3/3  loss 2.000  acc 0.5000  val_acc 0.2500" for epoch in (1, 2)),
        "validation  batch 2/2  val_acc 0.2500",
        "testing  batch 2/2",
        "predicting  batch 2/2",
    ]
    assert capsys.readouterr().out.count("a module's line") == 2


def test_logger_s_version_is_not_shown_and_its_name_is_taken(clock):
    bar = ProgressBar()
    trainer = Fake(bar, clock)
    trainer.loggers = [SimpleNamespace(version=7)]
    assert bar.get_metrics(trainer, None) == {"train_loss": 0.25}
    trainer.progress_bar_metrics = {"v_num": 3.0}
    with pytest.warns(UserWarning, match=r"The progress bar already tracks a metric with the name\(s\) 'v_num'"):
        assert bar.get_metrics(trainer, None) == {"v_num": 3.0}
