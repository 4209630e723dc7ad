"""Rank 0 of a simulated process group of any size: collectives return local data.

``fake_worker.py SIZE FILE`` saves the collectives of one step and the bytes of this rank's state to ``FILE``. With an
engine in the arguments, it saves the result of ``simulate_ranks`` for a small model.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from scripts import _ranks, _scale
from trainer.common.collectives import Collectives


def main(size, file):
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    Collectives.async_max = lambda self, count, purpose: None  # a group of gloo's
    Collectives.num_collectives = lambda self: 0  # a fake group does not count them
    file.write_text(json.dumps(_scale.count("fsdp", "16-mixed", True)))


if __name__ == "__main__":
    size, file, *engine = sys.argv[1:]
    if engine:
        found = _ranks.step(engine[0], int(size), width=64, heads=2, layers=3)
        Path(file).write_text(json.dumps(found))
        os._exit(0)  # nothing is put back
    main(int(size), Path(file))
