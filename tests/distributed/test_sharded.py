"""A sharded engine has the results of DDP with the same loops.

In float32 the two differ by the order of a few sums: at most 1e-6 in weights of about 1, after 10 updates. Under
float16 autocast such a difference may round to a neighbour in an activation: 1e-3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import sharded_worker as worker
from tests.distributed.test_ddp import load, run
from tests.support import needs_fsdp2
from tests.warm_python import WarmPython

pytestmark = [
    needs_fsdp2,
]


@pytest.fixture(scope="module")
def ranks(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return load(run(python, tmp_path_factory.mktemp("sharded"), "torchrun", script=Path(worker.__file__))[1])


@pytest.mark.parametrize("name", worker.scenarios())
def test_sharded_engine_equals_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    tolerance = 1e-3 if "precision" in worker.scenarios()[name][1] else 1e-6
    for rank in ranks:
        ddp, sharded = rank[name]["ddp"], rank[name]["sharded"]
        assert sharded["device_mesh"]
        assert not ddp["device_mesh"]
        for key, value in ddp["weights"].items():
            assert torch.isfinite(value).all()
            torch.testing.assert_close(sharded["weights"][key], value, rtol=0, atol=tolerance)
        for key in ("outcomes", "global_step", "skipped_steps", "scale"):
            assert sharded[key] == ddp[key], key
        assert sharded["norms"] == pytest.approx(ddp["norms"], rel=tolerance)
        assert sharded["are_plain"]
        assert sharded["is_put_back"]
        assert all(torch.equal(sharded["plain"][key], value) for key, value in sharded["weights"].items())
    weights = [rank[name]["sharded"]["weights"] for rank in ranks]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize("name", ["overflow on rank 0", "overflow on rank 1", "guard"])
def test_infinite_gradient_on_one_rank_skips_the_step_on_both(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]["sharded"]
        assert found["outcomes"] == [False, False, True, False, False] * 2
        assert found["scale"] == (1.0 if name == "guard" else 256.0)  # 1024, halved twice


def test_something_was_clipped(ranks: list[dict[str, Any]]) -> None:
    assert max(ranks[0]["clipped by norm"]["sharded"]["norms"]) > 0.3
    plain = ranks[0]["plain"]["sharded"]["weights"]
    for name in ("clipped by norm", "clipped by value"):
        assert not all(torch.equal(plain[key], value) for key, value in ranks[0][name]["sharded"]["weights"].items())
