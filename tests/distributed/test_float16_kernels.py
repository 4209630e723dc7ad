"""The float16 kernels of several processes on CPUs."""

import torch
from torch.utils.data import DataLoader

from tests.distributed.worker import Regression, samples
from tests.support import make_trainer, replaced_kernels
from trainer.precision import cpu_fp16


def fit(folder):
    """Return the families with our kernels in a step, on ranks that measure different ratios."""
    rank, used = torch.distributed.get_rank(), []
    own = {"attention": 5.0} if rank == 0 else {"matrix product": 4.0}
    saved = cpu_fp16.measured_ratio, cpu_fp16.is_faster
    cpu_fp16.measured_ratio, cpu_fp16.is_faster = (lambda family: own.get(family, 1.0)), (lambda module: True)

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            used.append(replaced_kernels())
            return super().training_step(batch, batch_idx)

    try:
        make_trainer(
            folder, devices=torch.distributed.get_world_size(), strategy="ddp", precision="16-mixed", max_steps=1,
            limit_val_batches=0,
        ).fit(Looking(), DataLoader(samples(), batch_size=2))  # fmt: skip
    finally:
        cpu_fp16.measured_ratio, cpu_fp16.is_faster = saved
    return used


def test_rank_zero_chooses_for_all_ranks(ranks, tmp_path):
    assert ranks.call(fit, tmp_path) == [[["attention"]], [["attention"]]]
