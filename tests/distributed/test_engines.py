"""The same fits on every engine by our Trainer and by hand: one device, DDP, and FSDP2 on two ranks.

Some run on four ranks: FSDP2 with copies of the shards, and with tensor parallelism. A seed is a set-up
(``setups.draw``); ``scripts/test --nightly`` runs many more.
"""

import random
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.distributed import by_hand, setups
from tests.distributed.ranks import RankError, Ranks
from tests.distributed.setups import Setup, draw
from tests.support import needs_fsdp2

TOLERANCES = {"32-true": 1e-6, "16-mixed": 1e-3, "bf16-mixed": 1e-2}
FSDP = pytest.param("fsdp", marks=needs_fsdp2)
ENGINES = ("single", "ddp", FSDP)
COVERING = (4, 7, 9, 10, 11)
"""Seeds that draw each feature: None, weights, uneven inputs, overflows, all kinds of clipping, manual optimization."""
SEEDS = [pytest.param(seed, marks=() if seed in COVERING else pytest.mark.nightly) for seed in range(106)]
OTHER_ENGINE = [(engine, sharded) for engine in ("ddp", "fsdp") for sharded in (False, True)]
RESUMED = [
    (4, "single"), (9, "ddp"), pytest.param(4, "fsdp", marks=needs_fsdp2), pytest.param(11, "fsdp", marks=needs_fsdp2),
    *(
        pytest.param(seed, engine, marks=pytest.mark.nightly)
        for seed in range(12, 106) for engine in ("single", "ddp", "fsdp")
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def four(python):
    with Ranks(python, 4) as ranks:
        yield ranks


def traces(ranks, setup, engine, diagnoses=False):
    """Return the traces of our Trainer and of the hand-written loop, for each rank."""
    arguments = setup, engine, 2, None, [] if diagnoses else [setups.without_diagnosis()]
    if engine == "single":
        return [setups.fit(*arguments)], [by_hand.train(setup, engine)]
    return ranks.call(setups.fit, *arguments), ranks.call(by_hand.train, setup, engine)


def assert_same(ours, theirs, tolerance, norm_tolerance=0.0):
    """Compare traces, bit for bit if the tolerances are 0."""
    assert ours.counts == theirs.counts
    for name in ("skipped", "scales", "next_scales", "rates"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.val_losses == pytest.approx(theirs.val_losses, rel=tolerance, abs=tolerance, nan_ok=True)
    assert ours.norms == pytest.approx(theirs.norms, rel=max(norm_tolerance, 20 * tolerance), nan_ok=True)
    assert len(ours.weights) == len(theirs.weights)
    for epoch, (found, expected) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
        close(found, expected, tolerance, f"epoch {epoch}")
    close(ours.state, theirs.state, tolerance, "optimizer")


def close(found, expected, tolerance, place):
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, equal_nan=True, msg=lambda message: f"{place}: {message}"
    )


def is_summed(setup, engine):
    """Return whether norms are sums over shards: DTensors sum per parameter, our engine per rank."""
    return engine == "fsdp" and setup.clip != "inf"


def tolerance_of(setup, engine):
    """Return the accepted difference from the hand-written loop: 0, unless sums have another order.

    That is the case in windows with unequal weights, and if a norm that clips is a sum over shards.
    """
    if setup.is_plain_mean and not (setup.clip == "norm" and is_summed(setup, engine)):
        return 0.0
    return TOLERANCES[setup.precision]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [pytest.param(4, marks=pytest.mark.representative), *SEEDS[:4], *SEEDS[5:]])
def test_random_fit_equals_the_hand_written_loop(ranks, seed, engine):
    setup = draw(seed)
    ours, theirs = traces(ranks, setup, engine, diagnoses=seed not in COVERING)
    for found, expected in zip(ours, theirs, strict=True):
        assert_same(found, expected, tolerance_of(setup, engine), 1e-6 if is_summed(setup, engine) else 0.0)


@needs_fsdp2
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_float8_is_that_of_one_device(ranks):
    setup = Setup("fp8-mixed", windows=(2, 1), clip="norm", none=frozenset({(1, 1, 0)}))
    alone, sixteen = setups.fit(setup, "single"), setups.fit(replace(setup, precision="bf16-mixed"), "single")
    assert not torch.allclose(alone.weights[-1]["net.1.up.weight"], sixteen.weights[-1]["net.1.up.weight"], atol=1e-4)
    for engine in ("ddp", "fsdp"):
        for trace in ranks.call(setups.fit, setup, engine):
            assert trace.counts == alone.counts
            close(trace.weights[-1], alone.weights[-1], TOLERANCES["bf16-mixed"], engine)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_fused_sgd_under_ddp_equals_the_hand_written_loop(ranks, precision):
    setup = Setup(precision, "sgd-fused", windows=(2, 1), clip="norm", schedule="step", overflow=(1, 0, 2), guard=True)
    for found, expected in zip(*traces(ranks, setup, "ddp"), strict=True):
        assert found.skipped.count(True) == 1
        assert_same(found, expected, 0.0)


def ranks_without_a_loss(*ranks):
    """Return the batches of the first window of 3 on these ranks."""
    return frozenset((rank, 0, index) for rank in ranks for index in range(3))


WITHOUT_LOSS = {
    "in the first batch, with large weights": Setup(
        "16-mixed", windows=(3, 3), weighted="number", unit=4096.0, none=frozenset({(0, 0, 0)})
    ),
    "in a window of one rank": Setup(windows=(3,), none=ranks_without_a_loss(1)),
    "in a window of all ranks": Setup(windows=(3,), none=ranks_without_a_loss(0, 1)),
    "after a sanity check": Setup(val_every=3, none=frozenset({(1, 0, 0)})),  # no forward had a backward pass
    "after a sanity check, late": Setup(val_every=3, none=frozenset({(1, 0, 0)}), late=True),
}


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("setup", WITHOUT_LOSS.values(), ids=WITHOUT_LOSS)
def test_batches_without_a_loss_on_one_rank_keep_the_loss_of_the_others(ranks, setup, engine):
    for found, expected in zip(*traces(ranks, setup, engine), strict=True):
        assert not any(found.skipped)
        assert_same(found, expected, TOLERANCES[setup.precision])


@pytest.mark.parametrize(("seed", "engine"), RESUMED)
def test_fit_resumed_anywhere_equals_the_uninterrupted_fit(ranks, tmp_path, seed, engine):
    """Compares weights, buffers, optimizers, scale and counters, with dropout and a random order of the batches."""
    setup = replace(draw(seed), noisy=True)
    pick, each = random.Random(seed), 2 if engine == "single" else 1
    total = len(setup.windows) * setup.batches * each
    batches = sorted(pick.sample(range(total), min(total, 2)))
    checks = setup.batches // setup.val_every * len(setup.windows) if setup.val_every else 0
    validations = [pick.randrange(checks)] if checks else []
    arguments = setup, engine, str(tmp_path), batches, validations
    results = (
        [setups.fit_and_resume(*arguments)] if engine == "single" else ranks.call(setups.fit_and_resume, *arguments)
    )
    for whole, resumed in results:
        assert len(resumed) == len(batches) + len(validations)
        for name, trace in resumed.items():
            assert trace.counts == whole.counts, name
            if not trace.weights:
                assert name == f"batch_{total - 1}"  # at the end no batch is left
                continue
            close(trace.weights[-1], whole.weights[-1], 0.0, name)
            close(trace.state, whole.state, 0.0, name)


@needs_fsdp2
@pytest.mark.parametrize(
    ("seed", "engine", "sharded"),
    [
        (4, "ddp", False), (9, "fsdp", True), (12, "fsdp", False), (11, "ddp", True),
        *(pytest.param(seed, *pair, marks=pytest.mark.nightly) for seed in range(13, 106) for pair in OTHER_ENGINE),
    ],
)  # fmt: skip
def test_fit_is_resumed_under_the_other_engine(ranks, tmp_path, seed, engine, sharded):
    """Resume at the end of an epoch, without BatchNorm, because only DDP broadcasts its buffers."""
    setup = draw(seed)
    other = {"ddp": "fsdp", "fsdp": "ddp"}[engine]
    arguments = setup, engine, str(tmp_path), [setup.batches - 1], [], 2, sharded, other
    for whole, resumed in ranks.call(setups.fit_and_resume, *arguments):
        (trace,) = resumed.values()
        assert trace.counts == whole.counts
        close(trace.weights[-1], whole.weights[-1], TOLERANCES[setup.precision], "weights")
        close(trace.state, whole.state, TOLERANCES[setup.precision], "optimizer")


@needs_fsdp2
def test_unused_gradients_are_not_resumed_under_the_other_engine(ranks, tmp_path):
    """In this manual optimization, the backward pass of one optimizer leaves gradients for the other one."""
    setup = draw(10)
    with pytest.raises(RankError, match=r"gradients that no optimizer step has used.*Trainer\(exact_resume=False\)"):
        ranks.call(setups.fit_and_resume, setup, "fsdp", str(tmp_path), [setup.batches - 1], [], 2, False, "ddp")


def test_process_without_a_batch_takes_part_in_ddps_forward_on_a_gpu_too(ranks):
    assert ranks.call(setups.forward_nothing_on_a_gpu) == [[1.0], [1.0]]  # the first one's buffer


@pytest.mark.parametrize("engine", ["ddp", FSDP])
def test_keeps_a_synchronized_batch_norm(ranks, engine):
    for classes in ranks.call(setups.classes_after_test, engine):
        assert classes == ["Linear", "SyncBatchNorm", "Linear"]


SHARES = {"hsdp": 4, "2d": 2}
"""Number of shares of the data on four ranks."""


@pytest.mark.parametrize(
    ("setup", "tolerance"),
    [
        pytest.param(
            Setup(batches=3, windows=(2, 1), schedule="step", val_every=2), 0.0, marks=pytest.mark.nightly, id="32-true"
        ),
        pytest.param(
            Setup("16-mixed", "adamw", batches=3, windows=(2, 2), clip="norm", schedule="step", overflow=(1, 0, 2)),
            1e-6,
            id="overflow",
        ),
    ],
)
@needs_fsdp2
@pytest.mark.parametrize("engine", ["hsdp", "2d"])
def test_fit_on_four_ranks_equals_the_hand_written_loop(four, tmp_path, setup, tolerance, engine):
    """One parameter has an infinite gradient in the batch of one rank. Clipping uses one norm for all ranks."""
    inside_a_window = setup.batches
    ours = four.call(setups.fit_and_resume, setup, engine, str(tmp_path), [inside_a_window], [], SHARES[engine], True)
    for (found, resumed), expected in zip(ours, four.call(by_hand.train, setup, engine, SHARES[engine]), strict=True):
        assert found.counts["skipped_steps"] == (setup.overflow is not None)
        assert len(found.norms) == (len(found.skipped) if setup.clip else 0)
        assert_same(found, expected, tolerance)
        assert_same(found, ours[0][0], 0.0)  # all ranks have the same result
        (again,) = resumed.values()
        assert again.counts == found.counts
        close(again.weights[-1], found.weights[-1], 0.0, "weights")
        close(again.state, found.state, 0.0, "optimizer")
