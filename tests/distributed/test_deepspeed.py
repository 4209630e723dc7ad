"""``strategy="deepspeed"`` on two processes: the weights that DDP learns, and what the Trainer tells of each step."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks
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


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_an_overflow_on_one_process_skips_on_both(ranks: Ranks, strategy: dict[str, Any]) -> None:
    setup = Setup(optimizer="adamw", schedule="step", overflow=(1, 0, 3))
    first, second = fit(ranks, setup, strategy, precision="16-mixed", gradient_clip_val=100.0)
    skipped, scales, next_scales, rates = zip(*first["outcomes"], strict=True)
    assert skipped == (False, False, False, True, *[False] * 6)
    assert scales == (1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096)
    assert next_scales == (1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096, 4096)
    assert rates == pytest.approx([0.01 * 0.8 ** (index - (index > 3)) for index in range(10)])  # it waits
    assert first["norms"][3] == float("inf")
    assert all(0.3 < norm < 5.0 for index, norm in enumerate(first["norms"]) if index != 3)
    assert first["counts"] == second["counts"] == (10, 1)
    assert first["scale"] == 4096
    for key in ("outcomes", "norms"):
        assert first[key] == second[key]
    for name, value in first["weights"].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, second["weights"][name])
    assert first["is_itself"]
    assert first["tested"] == pytest.approx(first["val_loss"], rel=1e-2)


def test_the_stages_measure_the_same_norms(ranks: Ranks) -> None:
    """Also where the scale doubles, at which stage 3 divides by the next one."""
    setup = Setup(optimizer="adamw")
    both = [fit(ranks, setup, {"stage": stage}, precision="16-mixed", gradient_clip_val=100.0)[0] for stage in (2, 3)]
    assert both[0]["norms"] == pytest.approx(both[1]["norms"], rel=1e-2)
    assert len({outcome[1] for outcome in both[0]["outcomes"]}) > 2


def test_what_deepspeed_cannot_do_is_refused(ranks: Ranks) -> None:
    for said in ranks.call("tests.distributed.deepspeed_worker:refusals"):
        assert len(said) == 6
        for sentence, part in zip(
            said,
            (
                "Got manual optimization with strategy='deepspeed'",
                "Got 2 optimizers with strategy='deepspeed'",
                "Got a batch without a loss with strategy='deepspeed'",
                "Got batches that count differently in one accumulation window",
                "Got 2 as the dataloader's batch size and 'train_micro_batch_size_per_gpu': 3 in the DeepSpeed config",
                "Got 3 to 5 training batches in a process. DeepSpeed needs as many in each",
            ),
            strict=True,
        ):
            assert part in sentence
