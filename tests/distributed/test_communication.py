"""DDP's communication hooks with a state: an exact resume is refused."""

import warnings
from functools import partial

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from tests.distributed.ranks import RankError
from tests.support import Regression, SavesAt, loader_of, make_batches, make_trainer, momentum

SAVED_AT = 5
STEPS = 9


class Counts:
    """A state of numbers: gradients shrink with each step."""

    def __init__(self):
        self.steps, self.name = 0, "shrinks"


def averaged(state, bucket, factor):
    future = distributed.all_reduce(bucket.buffer() * factor / distributed.get_world_size(), async_op=True).get_future()
    return future.then(lambda one: one.value()[0])


def shrinking(state, bucket):
    state.steps += bucket.is_last()
    return averaged(state, bucket, 1 / (1 + state.steps))


def post_local():
    subgroup, _ = distributed.new_subgroups(group_size=1)
    return PostLocalSGDState(None, subgroup, start_localSGD_iter=2), post_localSGD_hook


class CountsAsHook(Counts):
    """Has the hook as a method."""

    def hook(self, _, bucket):
        return shrinking(self, bucket)


HOOKS = {
    "counts": (lambda: (Counts(), shrinking), {}),
    "method": (lambda: (None, CountsAsHook().hook), {}),
    "post-local": (post_local, {"model_averaging_period": 3}),
    "max_norm": (lambda: (None, None), {"find_unused_parameters": True}),
}
"""Factories of hooks and their states, and options of the strategy."""


class Hooked(DDPStrategy):
    """Registers its hook on a CPU as well."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def setup(self, trainer):
        self._ddp_comm_state, self._ddp_comm_hook = self.make()
        super().setup(trainer)

    def _register_ddp_hooks(self):
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def fit(name, path, resumes=False, **arguments):
    """Fit, save ``path`` on the way, or resume from it."""
    make, options = HOOKS[name]
    module = Regression(optimizer=momentum)
    module.embedding = nn.Embedding(2, 2, max_norm=1.0) if name == "max_norm" else None
    data = loader_of(make_batches(STEPS, seed=distributed.get_rank()))
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(
            None, devices=2, strategy=Hooked(make, **options), use_distributed_sampler=False,
            callbacks=[] if resumes else [SavesAt(path, SAVED_AT)], enable_checkpointing=not resumes, **arguments,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=path if resumes else None)
    return {  # results, and warnings
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": getattr(getattr(trainer.strategy, "_model_averager", None), "step", None),
    }, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("name", "lost", "remedy"),
    [
        ("counts", "Counts", "Use a hook without a state"),
        ("method", "CountsAsHook", "Use a hook without a state"),
        ("post-local", "PostLocalSGDState", "Use a hook without a state"),
        ("max_norm", "the weights of each process", "Normalize the rows"),
    ],
)
def test_states_of_hooks_and_weights_that_differ_are_refused(ranks, tmp_path, name, lost, remedy):
    (_, warned), _ = ranks.call(fit, name, tmp_path / "a.ckpt")
    assert any(
        f"lacks values that the run has changed and that cannot be saved: {lost}" in message for message in warned
    )
    with pytest.raises(RankError) as error:
        ranks.call(fit, name, tmp_path / "a.ckpt", True)
    for part in (f"{lost} cannot be restored", remedy, "Trainer(exact_resume=False)"):
        assert str(error.value).count(part) >= 2
    for _, warned in ranks.call(partial(fit, exact_resume=False), name, tmp_path / "a.ckpt", True):
        assert any(lost in message for message in warned)
