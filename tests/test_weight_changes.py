"""Weights that change within a step, under autocast, against loops that clear autocast's cache at each change.

The oracle is the loop of torch's AMP examples in which the step clears the cache by hand; equality is to the bit.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import SavesAt, loader_of, make_batches, make_trainer
from tests.test_autocast import Casts, Stepping, assert_equal, by_hand, error_of, fit, ours, session
from trainer.errors import PrecisionError
from trainer.precision import MixedPrecision
from trainer.precision.cast_cache import WATCHED_STEPS

MIXED = ("bf16-mixed", "16-mixed-fast")
LATE = WATCHED_STEPS + 2
"""A batch after the observed ones."""


class Pair(nn.Module):
    """A net, others with weights to replace its weights, and aliases of its weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
        self.tied = nn.Embedding(7, 6, max_norm=0.5)
        self.aliases = [p.data.view(-1) for p in self.net.parameters()]


def each(change):
    """Return a function that calls ``change`` with each parameter of the net and that of the other net."""
    return lambda net, other: [*map(change, net.parameters(), other.parameters())]


def swap_by_copy(p, q):
    kept = p.data.clone()
    p.data.copy_(q.data)
    q.data.copy_(kept)


def swap_memory(p, q):
    p.data, q.data = q.data, p.data


def swap_state_dicts(net, other):
    kept = deepcopy(net.state_dict())
    net.load_state_dict(other.state_dict())
    other.load_state_dict(kept)


clamp = each(lambda p, q: p.data.clamp_(-0.05, 0.05))
CHANGES = {
    "swap_by_copy": each(swap_by_copy),
    "swap_memory": each(swap_memory),
    "swap_state_dicts": swap_state_dicts,
    "negate_data": each(lambda p, q: p.data.mul_(-1)),
    "negate": torch.no_grad()(each(lambda p, q: p.mul_(-1))),
    "negate_in_inference_mode": torch.inference_mode()(each(lambda p, q: p.data.mul_(-1))),
    "negate_at_once": lambda net, other: torch._foreach_neg_([p.data for p in net.parameters()]),
    "negate_into": each(lambda p, q: torch.neg(p.data, out=p.data)),
    "replace_data": each(lambda p, q: setattr(p, "data", -p.data)),
}


def twice(change):
    """A step that uses the net, changes it, uses it, and changes it again."""

    def step(pair, batch, clear):
        before = pair.net(batch[0])
        change(pair.net, pair.other)
        clear()
        with torch.no_grad():
            after = pair.net(batch[0]).float()
        change(pair.net, pair.other)
        return F.mse_loss(before, batch[1]) + (before.float() - after.clone()).pow(2).mean()

    return step


def through_an_alias(pair, batch, clear):
    before = pair.net(batch[0]).float().pow(2).mean()
    for alias in pair.aliases:
        alias.mul_(0.9)
    clear()
    return before + F.mse_loss(pair.net(batch[0]), batch[1])


def of_an_embedding(pair, batch, clear):
    """An embedding's ``max_norm`` changes weights in its forward pass, and the head shares them."""
    hidden = pair.net(batch[0])[:, :1] * pair.tied(torch.tensor([0, 1, 2, 3]))
    first = F.linear(hidden, pair.tied.weight).float().pow(2).mean()
    with torch.no_grad():
        pair.tied.weight.mul_(3)
        clear()
        drawn = pair.tied(torch.tensor([3, 4, 5, 6]))
    return first + F.linear(drawn.clone(), pair.tied.weight).float().pow(2).mean()


def inner_loop(pair, batch, clear):
    """A copy of the net takes optimizer steps inside the step (meta-learning)."""
    learner = deepcopy(pair.net)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.5)
    for _ in range(2):
        error = F.mse_loss(learner(batch[0]), batch[1])
        with torch.autocast("cpu", enabled=False):
            for p, g in zip(learner.parameters(), torch.autograd.grad(error, list(learner.parameters())), strict=True):
                p.grad = g
        optimizer.step()
        clear()
    return F.mse_loss(pair.net(batch[0]), learner(batch[0]).detach())


def checkpointed(pair, batch, clear):
    with torch.no_grad():
        target = pair.net(batch[0]).float()
    CHANGES["negate_data"](pair.net, pair.other)
    clear()
    output = checkpoint(pair.net, batch[0], use_reentrant=False)
    return F.mse_loss(output, batch[1]) + (output.float() - target.clone()).pow(2).mean()


STEPS = {
    **{name: twice(change) for name, change in CHANGES.items()},
    **{step.__name__: step for step in (through_an_alias, of_an_embedding, inner_loop, checkpointed)},
}


def nothing():
    """Leave the cache to the Trainer."""


def stepping(step):
    """Return a module that trains on ``step(pair, batch, clear)``, and leaves the cache to the Trainer."""
    return Stepping(Pair(), lambda pair, batch: step(pair, batch, nothing))


def expected_of(step, batches, precision, **options):
    pair = Pair()
    torch.manual_seed(5)
    by_hand(pair, lambda net, batch: step(net, batch, torch.clear_autocast_cache), batches, precision, **options)
    return pair


@pytest.mark.parametrize(("name", "precision"), [(name, MIXED[i % 2]) for i, name in enumerate(STEPS)])
def test_step_uses_the_weights_that_it_has_changed(tmp_path, precision, name):
    batches, module = make_batches(LATE + 2), stepping(STEPS[name])
    fit(tmp_path, module, batches, precision)
    assert_equal(module.net, expected_of(STEPS[name], batches, precision))


@pytest.mark.parametrize("name", ["swap_memory", "negate_data"])
def test_step_without_the_cache_uses_changed_weights_from_the_first_step(tmp_path, name):
    batches, module = make_batches(4), stepping(STEPS[name])
    fit(tmp_path, module, batches, MixedPrecision("bfloat16", autocast_cache=False))
    assert_equal(module.net, expected_of(STEPS[name], batches, "bf16-mixed"))


# --- changes that begin late ----------------------------------------------------------------------------------------


class CountsBatches:
    """Trains as ``early`` does, and from batch ``LATE`` on as ``late`` does."""

    def __init__(self, early, late):
        self.early, self.late, self.batches = early, late, 0

    def __call__(self, pair, batch, clear):
        self.batches += 1
        return (self.early if self.batches <= LATE else self.late)(pair, batch, clear)


def once(pair, batch, clear):
    return F.mse_loss(pair.net(batch[0]), batch[1])


def shared(pair, batch, clear):
    return F.mse_loss(pair.net(batch[0]), batch[1]) + pair.net(-batch[0]).float().pow(2).mean()


@pytest.mark.parametrize(
    ("early", "name"),
    [(once, "swap_memory"), (once, "negate"), (shared, "swap_state_dicts"), (shared, "inner_loop")],
)
def test_changes_that_begin_late_are_seen(tmp_path, early, name):
    """If weights were used once before; optimizer steps and state dicts in any step."""
    batches, module = make_batches(LATE + 4), stepping(CountsBatches(early, STEPS[name]))
    fit(tmp_path, module, batches, "bf16-mixed")
    assert_equal(module.net, expected_of(CountsBatches(early, STEPS[name]), batches, "bf16-mixed"))


@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [("bfloat16", {"log_every_n_steps": LATE + 1}), ("float16", {"limit_train_batches": LATE, "max_epochs": 2})],
)
def test_late_changes_of_other_kinds_end_the_run_at_the_next_check(tmp_path, dtype, arguments):
    """A check follows each row for the loggers and each beginning of an epoch; weights are not updated after it."""
    batches, step = make_batches(LATE + 4), CountsBatches(shared, STEPS["swap_by_copy"])
    module = stepping(step)
    with pytest.raises(PrecisionError, match=rf"MixedPrecision\('{dtype}', autocast_cache=False\)"):
        fit(tmp_path, module, batches, MixedPrecision(dtype), **arguments)
    assert module.net.net[0].weight.isfinite().all()
    assert module.trainer.global_step == step.batches - 1


# --- steps that change nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("enabled", "expected"), [(None, [1] * (LATE + 4)), (False, [2] * (LATE + 4))])
def test_how_often_a_weight_that_is_used_twice_is_cast(tmp_path, enabled, expected):
    counts = []

    def counting(pair, batch, clear):
        with Casts(pair.net[0].weight) as casts:
            loss = shared(pair, batch, clear)
        counts.append(casts.count)
        return loss

    fit(tmp_path, stepping(counting), make_batches(LATE + 4), MixedPrecision("bfloat16", autocast_cache=enabled))
    assert counts == expected


def test_weights_that_change_after_their_last_use_keep_the_cache(tmp_path):
    """A target network that follows at the end of a step, and weights that are clipped there."""

    def following(pair, batch, clear):
        loss = shared(pair, batch, clear) + F.mse_loss(pair.net(batch[0]), pair.other(batch[0]))
        with torch.no_grad():
            for q, p in zip(pair.other.parameters(), pair.net.parameters(), strict=True):
                q.mul_(0.9)
                q.add_(p, alpha=0.1)
        clamp(pair.net, pair.other)
        return loss

    batches, module, pair = make_batches(LATE + 4), stepping(following), Pair()
    for one in (module.net, pair):
        one.other.requires_grad_(True)
    fit(tmp_path, module, batches, "bf16-mixed")
    by_hand(pair, lambda net, batch: following(net, batch, nothing), batches, "bf16-mixed")
    assert_equal(module.net, pair)


# --- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "precision"), [*zip(("fit", "validate", "test", "predict"), MIXED * 2, strict=True)])
def test_evaluation_step_uses_the_weights_that_it_has_changed(tmp_path, precision, stage):
    seen = []

    class Evaluating(Stepping):
        def validation_step(self, batch, batch_idx):
            for _ in range(2):
                seen.append(self.net.net(batch[0]).float().clone())
                CHANGES["swap_by_copy"](self.net.net, self.net.other)
            return seen[-1]

        test_step = predict_step = validation_step

    module, pair, loader = Evaluating(Pair(), error_of), Pair(), loader_of(make_batches(LATE))
    options = {"limit_train_batches": 0, "num_sanity_val_steps": LATE}
    trainer = make_trainer(tmp_path, precision=ours(precision), **options)
    getattr(trainer, stage)(module, *[loader] * (1 + (stage == "fit")))
    with session(precision) as (autocast, _), torch.no_grad():
        for first, second, batch in zip(seen[::2], seen[1::2], make_batches(LATE), strict=True):
            with autocast():
                assert torch.equal(first, pair.net(batch[0]).float())
            with autocast():
                assert torch.equal(second, pair.other(batch[0]).float())


# --- resuming -------------------------------------------------------------------------------------------------------


def irregular(pair, batch, clear):
    """Uses weights several times at some batches only."""
    return shared(pair, batch, clear) if batch[2] == 1 else once(pair, batch, clear)


@pytest.mark.parametrize(
    ("step", "at"),
    [(irregular, 5), (irregular, LATE), (STEPS["negate_data"], 1), (through_an_alias, WATCHED_STEPS)],
    ids=["uses 5", "uses late", "negates 1", "scales watched"],
)
def test_resumed_run_decides_as_the_uninterrupted_one(tmp_path, step, at):
    """In the first half of the watched steps no weight is used twice; in the last steps none is, either."""
    batches = make_batches(LATE + 8, gains={i: 1.0 if 6 < i < 20 else 2.0 for i in range(LATE + 8)})
    whole = stepping(step)
    saving = {"callbacks": [SavesAt(tmp_path / "half.ckpt", at)], "enable_checkpointing": True}
    fit(tmp_path, whole, batches, "bf16-mixed", **saving)
    resumed = stepping(step)
    trainer = make_trainer(tmp_path, precision="bf16-mixed")
    trainer.fit(resumed, loader_of(batches), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(resumed.net, whole.net)


# --- devices, engines, arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "precision"), [("swap_state_dicts", "bf16-mixed"), ("negate_data", "16-mixed")])
def test_on_a_gpu(tmp_path, cuda, precision, name):
    batches, module = make_batches(LATE), stepping(STEPS[name])
    fit(tmp_path, module, batches, precision, accelerator="gpu", devices=1)
    assert_equal(module.net.cpu(), expected_of(STEPS[name], batches, precision, device="cuda").cpu())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "backend"), [("swap_memory", "eager"), ("negate_data", "aot_eager")])
def test_compiled_parts(tmp_path, name, backend):
    batches, module = make_batches(LATE), stepping(STEPS[name])
    module.net.net = torch.compile(module.net.net, backend=backend)
    fit(tmp_path, module, batches, "bf16-mixed")
    module.net.net = module.net.net._orig_mod
    assert_equal(module.net, expected_of(STEPS[name], batches, "bf16-mixed"))


@pytest.mark.parametrize("value", [1, "off", 0])
def test_impossible_values(value):
    with pytest.raises(PrecisionError, match=rf"autocast_cache={value!r}, expected True, False or None"):
        MixedPrecision(autocast_cache=value)
