"""Casts that torch 2.10 caches without a graph, and weights that change.

See also test_autocast, test_weight_changes.
"""

import pytest
import torch
import torch.optim.optimizer as optimizers
from packaging.version import Version
from torch import nn

from trainer.precision import MixedPrecision, cast_cache
from trainer.precision.cast_cache import WATCHED_STEPS, WeightWatch, loses_gradients


@pytest.fixture(autouse=True)
def fixed_torch(monkeypatch):
    """Test the decisions on torch 2.10, too."""
    monkeypatch.setattr(cast_cache, "loses_gradients", lambda: False)


def test_torch_2_10_loses_gradients_and_torch_2_11_does_not():
    loses_gradients.cache_clear()
    with torch.inference_mode():  # from any caller
        assert loses_gradients() is (Version(torch.__version__) < Version("2.11"))


@pytest.mark.parametrize("loses", [True, False])
def test_cache_is_used_as_requested_unless_torch_loses_gradients(monkeypatch, loses):
    monkeypatch.setattr(cast_cache, "loses_gradients", lambda: loses)
    for enabled in (True, False):
        plugin = MixedPrecision("bfloat16", autocast_cache=enabled)
        with plugin.session(nn.Linear(1, 1), torch.device("cpu")):
            plugin.watch_weights()
            assert type(plugin.autocast()) is torch.autocast
            with plugin.autocast():
                assert torch.is_autocast_cache_enabled() is (enabled and not loses)


class Steps:
    """A plugin in a session, its steps, and its observations of the last one."""

    def __init__(self, net, **arguments):
        self.plugin, self.net = MixedPrecision("bfloat16", **arguments), net

    def __call__(self, uses=1, change=None):
        """Run a step; return "watched", or whether autocast's cache was enabled."""
        context = self.plugin.autocast()
        with context:
            self.net(torch.ones(2, 2))
            if change is not None:
                change(self.net)
            for _ in range(uses - 1):
                self.net(torch.ones(2, 2))
            cached = torch.is_autocast_cache_enabled()
        return "watched" if isinstance(context, WeightWatch) else "cached" if cached else "uncached"


def negate(net):
    for p in net.parameters():
        p.data.neg_()


@pytest.mark.parametrize(
    ("uses", "change", "watched", "then"),
    [
        (1, None, WATCHED_STEPS, "uncached"),
        (2, None, WATCHED_STEPS, "cached"),
        (1, negate, WATCHED_STEPS, "uncached"),
        (2, negate, 1, "uncached"),
    ],
)
def test_first_steps_decide(uses, change, watched, then):
    steps = Steps(nn.Linear(2, 2))
    with steps.plugin.session(steps.net, torch.device("cpu")):
        steps.plugin.watch_weights()
        for _ in range(watched):
            assert steps(uses, change) == "watched"
        assert steps() == then
        with torch.no_grad():
            assert steps() == "uncached"
        steps.plugin.watch_weights()
        assert steps() == ("watched" if then == "cached" else "uncached")
        assert steps() == then


READS = {
    "shape": lambda net: net.weight.shape,
    "number of elements": lambda net: net.weight.numel(),
    "clone": lambda net: net.weight.clone(),
    "clipped at the end": lambda net: [p.data.mul_(0.9).add_(0.1) for p in net.parameters()],
    "loaded at the end": lambda net: net.load_state_dict(net.state_dict()),
    "gradient flags": lambda net: net.requires_grad_(False).requires_grad_(True),
}


@pytest.mark.parametrize("read", READS)
def test_weight_access_without_a_cast_does_not_count_as_use(read):
    """Accesses without a cast after the only use of the weights need no cache and cause no stale values."""
    steps = Steps(nn.Linear(2, 2))
    with steps.plugin.session(steps.net, torch.device("cpu")):
        for _ in range(WATCHED_STEPS):
            assert steps(1, READS[read]) == "watched"
        assert steps() == "uncached"


def test_changes_of_modules_and_torch_are_undone():
    net, steps = nn.Sequential(nn.Linear(2, 2)), Steps(nn.Linear(2, 2))
    hooks = len(optimizers._global_optimizer_post_hooks)
    for uses in (1, 2):
        steps = Steps(net)
        with steps.plugin.session(net, torch.device("cpu")):
            for _ in range(WATCHED_STEPS):
                steps(uses)
            assert len(optimizers._global_optimizer_post_hooks) == hooks + uses - 1
            assert len(net[0]._load_state_dict_post_hooks) == uses - 1
        assert len(optimizers._global_optimizer_post_hooks) == hooks
        assert not net[0]._load_state_dict_post_hooks


def test_step_that_fails_is_not_counted():
    steps = Steps(nn.Linear(2, 2))
    with steps.plugin.session(steps.net, torch.device("cpu")):
        for _ in range(WATCHED_STEPS):
            with pytest.raises(KeyError), steps.plugin.autocast():
                raise KeyError
        assert steps() == "watched"


def test_tensors_without_storage_or_version_are_accepted():
    """Tensors of torch.func, sparse tensors and inference tensors."""
    net = nn.Linear(2, 2)
    with torch.inference_mode():
        made = torch.ones(2, 2)

    def step(net):
        torch.func.vmap(net)(torch.ones(3, 2, 2))
        weights = dict(net.named_parameters())
        torch.func.grad(lambda w: torch.func.functional_call(net, w, made.clone()).float().sum())(weights)
        torch.eye(2).to_sparse().mul_(2)
        made.add(1)

    steps = Steps(net)
    with steps.plugin.session(net, torch.device("cpu")):
        assert steps(1, step) == "watched"
        left = WATCHED_STEPS - 1
        assert steps.plugin.state_dict() == {"enabled": None, "steps_left": left, "reuses_weights": True}


def test_user_decides_across_a_resume():
    saved = Steps(nn.Linear(2, 2))
    with saved.plugin.session(saved.net, torch.device("cpu")):
        for _ in range(WATCHED_STEPS):
            saved(2)
        state = saved.plugin.state_dict()
    assert state["enabled"] is True
    for given, expected in {True: "cached", False: "uncached", None: "cached"}.items():
        resumed = Steps(nn.Linear(2, 2), autocast_cache=given)
        with resumed.plugin.session(resumed.net, torch.device("cpu")):
            assert resumed.plugin.state_dict() == ({} if given is not None else resumed.plugin.state_dict())
            resumed.plugin.load_state_dict(state)
            assert resumed() == expected
    with saved.plugin.session(saved.net, torch.device("cpu")):
        saved.plugin.load_state_dict({})
        assert saved() == "watched"
