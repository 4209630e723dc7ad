"""Optimizers that libraries exchange, step without Lightning's wrappers, or count themselves."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.parity import Learner, data, ours, run_both
from trainer.errors import ConfigurationError


def test_optimizer_that_evaluates_the_loss_cannot_be_set_inside_a_batch():
    class Switches(Learner):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.strategy.optimizers = [torch.optim.LBFGS(self.parameters())]

    with pytest.raises(ConfigurationError, match=r"replaced by LBFGS, .* Replace them in `on_train_epoch_start`"):
        ours(max_epochs=1).fit(Switches(), data(2))


class Competitive(Learner):
    """Two models against each other; steps plain optimizers and schedules, and updates Lightning's count itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.discriminator = torch.nn.Linear(4, 1)
        self.pairs = []

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.net, self.discriminator)]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5) for optimizer in optimizers]
        self.pairs = list(zip(optimizers, schedules, strict=True))
        return optimizers, schedules

    def training_step(self, batch, batch_idx):
        for sign, (optimizer, schedule) in zip((1, -1), self.pairs, strict=True):
            optimizer.zero_grad()
            loss = self.loss(batch) * self.discriminator(batch[0]).square().mean()
            self.manual_backward(sign * loss)
            optimizer.step()
            schedule.step()
        self.log("train_loss", loss.item(), on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        epoch_loop = self.trainer.fit_loop.epoch_loop
        epoch_loop.manual_optimization.optim_step_progress.total.completed += 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_module_that_counts_its_steps_is_resumed(tmp_path):
    def scenario(make):
        folder = tmp_path / type(make()).__module__
        saver = ModelCheckpoint(folder, save_last=True)
        trainer, module = make(max_epochs=2, callbacks=[saver], enable_checkpointing=True), Competitive()
        trainer.fit(module, data(6))
        saved = torch.load(saver.best_model_path, weights_only=True)
        counts = saved["loops"]["fit_loop"]["epoch_loop.manual_optimization.optim_step_progress"]
        again = Competitive()
        resumed = make(max_epochs=3, callbacks=[ModelCheckpoint(folder / "resumed")], enable_checkpointing=True)
        resumed.fit(again, data(6), ckpt_path=saver.best_model_path)
        files = sorted(path.name for path in folder.rglob("*.ckpt"))
        weights = [value.tolist() for value in (*module.state_dict().values(), *again.state_dict().values())]
        return weights, counts, saved["global_step"], resumed.global_step, files

    theirs, mine = run_both(scenario)
    assert mine == theirs
    assert mine[1] == {"total": {"ready": 0, "completed": 6}, "current": {"ready": 0, "completed": 0}}
    assert mine[4] == ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt", "last.ckpt"]
