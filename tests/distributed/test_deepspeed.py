"""``strategy="deepspeed"`` on two processes: the weights that DDP learns, and what the Trainer tells of each step."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.distributed.ranks import RankError, Ranks
from tests.distributed.setups import Setup
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")]

OFFLOAD = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
STRATEGIES: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 3}, OFFLOAD]


@pytest.fixture(scope="module")
def ranks(python: WarmPython) -> Iterator[Ranks]:
    with Ranks(python, 2, timeout=120.0) as ranks:
        yield ranks


def fit(ranks: Ranks, setup: Setup, strategy: Any, **arguments: Any) -> list[dict[str, Any]]:
    ckpt_path = arguments.pop("ckpt_path", None)
    return ranks.call("tests.distributed.deepspeed_worker:fit", setup, strategy, arguments, ckpt_path)


SETUPS: list[tuple[Setup, dict[str, Any]]] = [
    (Setup(optimizer="adamw", schedule="step"), {"gradient_clip_val": 0.3}),
    (Setup(optimizer="sgd", schedule="epoch", frozen=True), {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
]


@pytest.fixture(scope="module")
def by_ddp(ranks: Ranks) -> list[dict[str, Any]]:
    return [fit(ranks, setup, "ddp", **arguments)[0] for setup, arguments in SETUPS]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_the_weights_are_those_of_ddp(ranks: Ranks, by_ddp: list[Any], number: int, strategy: dict[str, Any]) -> None:
    (setup, arguments), ddp = SETUPS[number], by_ddp[number]
    for rank in fit(ranks, setup, strategy, **arguments):
        for name, value in ddp["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-6)
        assert rank["outcomes"] == ddp["outcomes"]
        assert rank["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert rank["counts"] == ddp["counts"]
        assert rank["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-5)
        assert rank["tested"] == pytest.approx(rank["val_loss"], rel=1e-6)
        assert rank["is_itself"]
        assert rank["is_plain"]
        assert rank["left"] == []
