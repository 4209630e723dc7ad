"""Our counters in Lightning's format, compared with Lightning's checkpoints."""

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.loop.test_hooks import Scheduled
from tests.parity import Classifier, assert_agree, data


class FailedError(Exception):
    pass


class ByHand(Scheduled):
    """Uses manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def failing(base, hook, *place):
    """Return a module that fails in ``hook`` in the second epoch, at this batch (and dataloader)."""

    def fails(self, *args):
        if (self.current_epoch, *(one for one in args if isinstance(one, int))) == (1, *place):
            raise FailedError
        return getattr(base, hook)(self, *args)

    return type("Fails", (base,), {hook: fails})()


def counts(fit_loop):
    """Return the counters only."""
    return {key: value for key, value in fit_loop.items() if not key.endswith("state_dict")}


class TwoLoaders(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0): ...


@pytest.mark.parametrize(
    ("place", "accumulate"),
    [
        ((Scheduled, "training_step", 1), 1),
        ((Scheduled, "training_step", 1), 3),
        ((Scheduled, "training_step", 2), 2),
        ((TwoLoaders, "validation_step", 1, 1), 1),
        ((Scheduled, "on_train_batch_end", 1), 2),
        ((ByHand, "on_train_batch_end", 1), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(previous `fit` call will be used|there is no last checkpoint)")
def test_failed_runs_checkpoint_counts_as_lightnings(place, accumulate, tmp_path):
    def scenario(make):
        saver = OnExceptionCheckpoint(tmp_path / make.__name__)
        given = {"accumulate_grad_batches": accumulate, "val_check_interval": 2, "enable_checkpointing": True}
        trainer = make(max_epochs=3, callbacks=saver, **given)
        val = [data(4), data(6, seed=1)] if place[0] is TwoLoaders else data(4)
        with pytest.raises(FailedError):
            trainer.fit(failing(*place), data(6), val)
        saved = torch.load(saver.ckpt_path, weights_only=True)["loops"]["fit_loop"]
        loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        seen = [counts(saved), counts(loop.state_dict())]
        loop.load_state_dict(saved)
        seen.append(counts(loop.state_dict()))
        loop.reset()
        epoch_loop.reset()
        current = epoch_loop.batch_progress.current
        optimizer = epoch_loop.automatic_optimization.optim_progress.optimizer
        seen += [current.ready, current.completed, optimizer.step.current.ready, optimizer.zero_grad.current.completed]
        return [*seen, epoch_loop.scheduler_progress.total.completed]

    assert_agree(scenario)
