import pytest
from lightning.pytorch import Callback

from tests.parity import looks_in
from tests.support import Regression, fit_and_watch, loader_of, make_batches, make_trainer, native_fp16
from trainer.state.progress import EPOCH_ENDED, STARTED, TRAINED, EvalProgress, FitProgress


def test_every_counter_of_a_fit(tmp_path):
    """Two epochs of 3 batches in windows of 2, the last one short; its batch overflows."""
    seen = []

    @looks_in("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    class Look(Callback):
        def look(self, hook, trainer):
            p = trainer.progress
            if hook == "on_train_epoch_end":
                assert (p.epochs_trained, p.position, p.closing) == (p.epoch + 1, EPOCH_ENDED, False)
                return
            moment = hook.removeprefix("on_train_batch_")
            seen.append((moment, p.epoch, p.batch_idx, p.batches, p.optimizer_steps, p.skipped_steps, p.updates))
            assert (p.position, p.is_last_batch) == ({"start": STARTED, "end": TRAINED}[moment], p.batch_idx == 2)
            assert p.closing is (moment == "end" and p.batch_idx > 0)

    batches, plugin = make_batches(3, gains={2: 1e30}), native_fp16(init_scale=64.0)
    options = {"callbacks": [Look()], "accumulate_grad_batches": 2, "max_epochs": 2}
    trainer, _ = fit_and_watch(tmp_path, Regression(), batches, precision=plugin, **options)
    assert seen == [
        ("start", 0, 0, 0, 0, 0, 0), ("end", 0, 0, 1, 0, 0, 0),
        ("start", 0, 1, 1, 0, 0, 0), ("end", 0, 1, 2, 1, 0, 0),
        ("start", 0, 2, 2, 1, 0, 1), ("end", 0, 2, 3, 2, 1, 1),
        ("start", 1, 0, 3, 2, 1, 2), ("end", 1, 0, 4, 2, 1, 2),
        ("start", 1, 1, 4, 2, 1, 2), ("end", 1, 1, 5, 3, 1, 2),
        ("start", 1, 2, 5, 3, 1, 3), ("end", 1, 2, 6, 4, 2, 3),
    ]  # fmt: skip
    progress = trainer.progress
    assert (progress.epoch, progress.epochs_trained, progress.batch_idx, progress.updates) == (2, 2, -1, 4)
    assert (trainer.current_epoch, trainer.global_step, trainer.skipped_steps) == (2, 4, 2)


@pytest.mark.parametrize(("is_interrupted", "place"), [(False, (1, 1)), (True, (2, -1))])
def test_epoch_that_ended_early_is_continued_but_not_one_that_was_interrupted(is_interrupted, place):
    progress, resumed = FitProgress(epoch=1, epochs_trained=1, batches=3), FitProgress()
    progress.begin_epoch()
    for batch_idx in range(2):
        progress.batch_idx = batch_idx
        progress.batches_started += 1
        progress.batches += 1
    progress.epochs_trained = 2
    (progress.restart_epoch if is_interrupted else progress.end_epoch)()
    resumed.load_state_dict(progress.state_dict(), finish_epoch=True)
    assert (resumed.epoch, resumed.batch_idx) == place


def test_validation_that_is_repeated_counts_each_batch_once():
    progress = EvalProgress(batches=3, batches_done=2, total_batches=7, total_done=6)
    progress.forget_batches()
    assert (progress.total_batches, progress.total_done) == (4, 4)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_batch_that_failed_is_trained_again_after_a_resume(tmp_path):
    """Its checkpoint is written during the batch."""
    trained = []

    class Fails(Regression):
        fails = True

        def training_step(self, batch, batch_idx):
            if batch_idx == 3 and self.fails:
                raise RuntimeError("now")
            trained.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module, batches = Fails(), loader_of(make_batches(6))
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match="now"):
        trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "failed.ckpt")
    module.fails = False
    with pytest.warns(UserWarning, match=r"written inside a batch, batch_idx 3 of epoch 0\. The batch is repeated"):
        make_trainer(tmp_path).fit(module, batches, ckpt_path=tmp_path / "failed.ckpt")
    assert trained == [0, 1, 2, 3, 4, 5]
