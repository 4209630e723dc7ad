"""Count the work of rank 0 in a fit on a simulated process group of any size, with all features.

``growth_worker.py FILE SIZE ...`` saves the counts for each size to ``FILE``. torch's part (collectives, the plan of a
sharded save) is left out or replaced: data of other ranks equals that of rank 0.
"""

import json
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch.distributed as distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from scripts._ranks import Collectives
from tests.distributed.worker import Regression, samples
from tests.support import native_fp16
from trainer import CheckpointFiles, Trainer
from trainer.checkpoint import shards
from trainer.common import collectives

counts = Counter()
plain_save = shards._save_state_dict


def received(objects):
    counts["objects received"] += len(objects)
    counts["bytes received"] += sum(len(pickle.dumps(one)) for one in objects)


def gather_object(mine, out=None, *_, **__):
    if out is not None:
        out[:] = [mine] * len(out)
        received(out)


def all_gather_object(out, mine, *_, **__):
    gather_object(mine, out)


def broadcast_object_list(objects, *_, **__):
    received(objects)


def save_alone(tensors, writer, group, no_dist):
    return plain_save(tensors, writer, None, no_dist=True)


def count_calls(frame, event, argument):
    if event == "call" and str(frame.f_globals.get("__name__")).startswith("trainer."):
        counts["calls"] += 1


def replace_torchs():
    warnings.simplefilter("ignore")
    distributed.gather_object, distributed.all_gather_object = gather_object, all_gather_object
    distributed.broadcast_object_list = broadcast_object_list
    distributed.new_group = lambda *_, **__: distributed.group.WORLD
    collectives.Collectives.num_collectives = lambda self: 0  # a fake group does not count them
    shards._save_state_dict = save_alone


def measure(size, folder):
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    counts.clear()
    with Collectives() as collectives:
        sys.setprofile(count_calls)
        trainer = Trainer(
            accelerator="cpu", devices=size // 4, num_nodes=4, strategy="fsdp", max_epochs=2, log_every_n_steps=1,
            precision=native_fp16(), gradient_clip_val=1.0, logger=CSVLogger(folder, version=0), resume="auto",
            enable_progress_bar=False, use_distributed_sampler=False, plugins=[CheckpointFiles(sharded=True)],
            callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True)], default_root_dir=folder,
        )  # fmt: skip
        loader = DataLoader(samples(16), batch_size=4)
        trainer.fit(Regression(), loader, loader)
        sys.setprofile(None)
    distributed.destroy_process_group()
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return {"ours": dict(counts), "collectives": dict(collectives.counts), "files": files}


if __name__ == "__main__":
    replace_torchs()
    file, *sizes = sys.argv[1:]
    found = [measure(int(size), Path(file).parent / f"{turn}") for turn, size in enumerate(sizes)]
    Path(file).write_text(json.dumps(found))
