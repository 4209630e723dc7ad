"""Two ranks of DDP on the CPU: equal to one process, by each launcher."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.distributed import worker
from tests.distributed.ranks import run_program
from tests.distributed.worker import AUTOMATIC, Regression, fit
from tests.support import SavesAt, assert_identical, make_trainer


def launch(python, folder, *torchrun):
    """Return the results of both ranks of ``worker.py``, started by torchrun or by the Trainer."""
    status, output = run_program(python, *torchrun, worker.__file__, str(folder), timeout=150)
    assert status == 0, output[-4000:]
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=tolerance)


def test_two_ranks_equal_one_process_on_the_same_batches(ranks):
    expected = fit(Regression(), AUTOMATIC, 1)
    assert expected["global_step"] == 6  # windows of 2, 2 and 1 in each of 2 epochs
    assert max(expected["norms"]) > 0.5  # gradients were clipped
    for rank in ranks.call(fit, Regression(), AUTOMATIC):
        assert_close(rank, expected, 1e-6)
        assert rank["global_step"] == expected["global_step"]
        assert rank["norms"] == pytest.approx(expected["norms"], abs=2e-5)
        assert rank["reduced"] == [False, True, False, True, True] * 2  # once in a window


@pytest.mark.parametrize("torchrun", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_launched_ranks_have_the_same_bits(python, tmp_path, ranks, torchrun):
    found = launch(python, tmp_path, *torchrun)
    assert [(rank["rank"], rank["world_size"]) for rank in found] == [(0, 2), (1, 2)]
    for rank, expected in zip(found, ranks.call(fit, Regression(), AUTOMATIC), strict=True):
        assert_close(rank, expected, 0.0)
        assert_close(rank, found[0], 0.0)


class Unfreeze(Callback):
    """Trains the first layer's weight from the second epoch on, and the last layer's before; or from the third batch.

    Args:
        inside: whether it is the third batch.
    """

    def __init__(self, inside):
        self.inside = inside

    def setup(self, trainer, pl_module, stage):
        pl_module.net[0].weight.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if not self.inside:
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch > 0)
            pl_module.net[2].weight.requires_grad_(trainer.current_epoch == 0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.inside:
            pl_module.net[0].weight.requires_grad_(trainer.progress.batches >= 2)


@pytest.mark.parametrize(("inside", "window"), [(False, 1), (True, 4)])
def test_parameters_unfrozen_later_are_averaged(ranks, tmp_path, inside, window):
    path, arguments = tmp_path / "middle.ckpt", {"callbacks": [Unfreeze(inside)], "accumulate_grad_batches": window}
    expected = fit(Regression(), arguments, 1)
    assert not torch.equal(Regression().net[0].weight, expected["weights"]["net.0.weight"])
    saving = {"callbacks": [Unfreeze(inside), SavesAt(path, batches=7)], "enable_checkpointing": True}
    whole = ranks.call(fit, Regression(), arguments | saving)
    resumed = ranks.call(fit, Regression(), arguments | {"ckpt_path": path})
    for rank in range(2):
        assert_close(whole[rank], expected, 1e-6)
        assert_close(resumed[rank], whole[rank], 0.0)


def test_none_with_find_unused_parameters(ranks):
    """The forward had no tensors in None, so that DDP took all parameters for unused."""
    arguments = {"accumulate_grad_batches": 3, "max_epochs": 1}
    unused = {"strategy": "ddp_find_unused_parameters_true"}
    none_at = {(1, 1), (0, 2)}
    found, expected = (ranks.call(fit, Regression(none_at), arguments | one) for one in (unused, {}))
    assert_identical([rank["weights"] for rank in found], [rank["weights"] for rank in expected])


class LogsByRank(Regression):
    """Logs other values of a training metric on each rank, which are not reduced."""

    def training_step(self, batch, batch_idx):
        values = [[3.0, 1.0, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]][self.global_rank]
        self.log("loss_of_rank", values[self.current_epoch], on_step=False, on_epoch=True, batch_size=4)
        return super().training_step(batch, batch_idx)


def select_best(folder, start):
    """Return the best checkpoint, and the state of an early stop."""
    module, stops = LogsByRank(), EarlyStopping("loss_of_rank", patience=2)
    saver = ModelCheckpoint(folder, "{epoch}-{loss_of_rank:.0f}", monitor="loss_of_rank")
    arguments = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": [stops, saver]}
    trainer = make_trainer(folder, devices=2, strategy="ddp", **arguments)
    data = DataLoader(worker.samples(), batch_size=20)
    trainer.fit(module, data, ckpt_path=start)
    trainer.validate(module, data, ckpt_path="best", verbose=False)
    return str(trainer.ckpt_path), saver.best_model_score.item(), trainer.current_epoch, stops.state_dict()


def test_checkpoint_is_selected_by_the_metric_of_rank_0_and_an_early_stop_of_one_rank_is_resumed(ranks, tmp_path):
    path = tmp_path / "epoch=1-loss_of_rank=1.ckpt"
    whole = ranks.call(select_best, tmp_path, None)
    assert [(*best, state["wait_count"]) for *best, state in whole] == [(str(path), 1.0, 3, n) for n in (1, 2)]
    assert [*tmp_path.iterdir()] == [path]
    assert ranks.call(select_best, tmp_path, path) == whole
