import re
from functools import partial

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler, PyTorchProfiler, SimpleProfiler

from tests.parity import Classifier, Learner, data, ours, run_both
from tests.support import Regression, loader_of, make_batches, manual_step


class Everything(Classifier):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Manual(Everything):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        manual_step(self, self.loss(batch))


NOT_OURS = re.compile(
    r".*\.(configure_callbacks|on_save_checkpoint|on_(before|after)_batch_transfer"
    r"|configure_gradient_clipping)$"
)
"""Actions that only Lightning profiles: empty batch hooks, and clipping without a value."""

NOT_THEIRS = re.compile(
    r"\[Callback\](ScalerCheckpoint|NonFiniteGuard|OverflowReport)|setup_\w+_dataloader|.*on_after_optimizer_step"
)


@pytest.mark.parametrize(
    ("module", "functions"), [(Everything, ["fit", "validate", "test", "predict"]), (Manual, ["fit"])]
)
def test_actions_have_lightnings_names(module, functions):
    def scenario(make):
        profiler, stopping = SimpleProfiler(), EarlyStopping("loss", strict=False, check_on_train_epoch_end=True)
        trainer = make(max_epochs=2, profiler=profiler, callbacks=[stopping])
        counts = {}
        for function in functions:
            profiler.recorded_durations.clear()
            getattr(trainer, function)(module(), data(6), *[data(4)] * (function == "fit"))
            counts[function] = {name: len(times) for name, times in profiler.recorded_durations.items()}
        return counts

    theirs, mine = run_both(scenario)
    for function in functions:
        a, b = theirs[function], mine[function]
        assert [name for name in a if name not in b and not NOT_OURS.match(name)] == []
        assert [name for name in b if name not in a and not NOT_THEIRS.match(name)] == []
        assert [(name, a[name], b[name]) for name in a.keys() & b.keys() if a[name] != b[name]] == []
    assert mine["fit"]["run_training_batch"] == mine["fit"]["[Strategy]SingleDeviceStrategy.training_step"] == 6
    assert "setup_train_dataloader" in mine["fit"]


def test_epoch_that_raised_is_closed():
    trainer, module = ours(max_epochs=1, profiler="simple"), Regression(change=lambda loss, batch_idx: loss / {}[0])
    for _ in range(2):  # a profiler cannot start an action that is running
        with pytest.raises(KeyError):
            trainer.fit(module, loader_of(make_batches(1)))
    assert trainer.profiler.current_actions == {}


UNCUT = partial(PyTorchProfiler, schedule=None, row_limit=-1, table_kwargs={"max_name_column_width": 100})


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.10
@pytest.mark.parametrize("kind", [SimpleProfiler, UNCUT])
def test_each_function_has_a_file(kind, tmp_path):
    profiler, module = kind(filename="profile"), Classifier()
    trainer = ours(fast_dev_run=2, profiler=profiler, default_root_dir=tmp_path)
    for function, step in (("fit", "training"), ("validate", "validation"), ("test", "test"), ("predict", "predict")):
        getattr(trainer, function)(module, data(4), *[data(4)] * (function == "fit"))
        assert f"SingleDeviceStrategy.{step}_step" in (tmp_path / f"{function}-profile.txt").read_text()
    assert profiler.dirpath == str(tmp_path)


def test_run_without_a_profiler_wraps_no_call():
    trainer = ours(max_epochs=1)
    trainer.fit(Learner(), data(4))
    assert type(trainer.profiler) is PassThroughProfiler
    path, loop = trainer.loop.path, trainer.loop
    expected = (loop.train_batch, loop.gradients.backward, loop.update_weights)
    assert (path.train_batch, path.backward, path.update_weights) == expected
