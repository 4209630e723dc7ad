"""``strategy="fsdp"`` trains all kinds of modules to the weights of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import fsdp_worker as worker
from tests.distributed.test_ddp import load, run
from tests.support import needs_fsdp2
from tests.warm_python import WarmPython

pytestmark = [
    needs_fsdp2,
]


@pytest.fixture(scope="module")
def ranks(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return load(run(python, tmp_path_factory.mktemp("fsdp"), "torchrun", script=Path(worker.__file__))[1])


@pytest.mark.parametrize("name", worker.scenarios())
def test_fsdp_equals_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    scenario = worker.scenarios()[name]
    for rank in ranks:
        ddp, sharded = rank[name]["ddp"], rank[name]["sharded"]
        assert ddp["weights"].keys() == sharded["weights"].keys()
        for key, value in ddp["weights"].items():
            assert torch.isfinite(value).all()
            torch.testing.assert_close(sharded["weights"][key], value, rtol=0, atol=scenario.tolerance)
            assert torch.equal(sharded["restore_module"][key], sharded["weights"][key])
        for key in ("outcomes", "global_step", "skipped_steps", "classes", "grads", "hooks"):
            assert sharded[key] == ddp[key], key
        assert sharded["norms"] == pytest.approx(ddp["norms"], rel=max(scenario.tolerance, 1e-6))
    weights = [rank[name]["sharded"]["weights"] for rank in ranks]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
