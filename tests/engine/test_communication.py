"""State of communication hooks: its parts, one by one. Hooks that train: tests/distributed/test_communication.py."""

import random
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from tests.support import assert_identical
from trainer.engine import communication

CPU = torch.device("cpu")


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def resumed(saved, first, new, same_buckets=True):
    """Save one holder, and load its state into a new one through a file that torch reads."""
    states = communication.state_of([saved], first)
    return communication.load([new], communication.numbers_of([new]), states, same_buckets=same_buckets, device=CPU)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: PostLocalSGDState(None, None, 3), "start_localSGD_iter"),
        (lambda: PowerSGDState(None), "matrix_approximation_rank"),
    ],
)
def test_states_of_torch_keep_their_settings_and_restore_their_step(make, setting):
    state, new = make(), make()
    first = communication.numbers_of([state])
    state.iter = 7
    if has_generator := hasattr(state, "rng"):
        state.rng.rand()
    setattr(new, setting, 5)
    assert resumed(state, first, new) == []
    assert (new.iter, getattr(new, setting)) == (7, 5)
    assert not has_generator or new.rng.rand() == state.rng.rand()


def test_values_of_all_kinds():
    def make(factor):
        return Holder(
            number=factor, flag=factor > 1, text="a" * factor, nothing=None, tensor=torch.full((2,), float(factor)),
            table=defaultdict(list, {factor: [torch.ones(factor)]}), past=deque([factor], 3), pair=(factor, [factor]),
            seen={factor}, random=random.Random(factor), generator=torch.Generator().manual_seed(factor),
            numpy=np.random.default_rng(factor), module=nn.Linear(1, 1), function=len,
            weights=[nn.Parameter(torch.ones(3))],
        )  # fmt: skip

    old, new = make(2), make(1)
    kept = {name: getattr(new, name) for name in ("module", "function", "weights", "random")}
    assert resumed(old, [], new) == []
    for name, value in vars(old).items():
        if name in ("random", "generator", "numpy"):
            continue
        assert_identical(*((kept[name],) * 2 if name in kept else (vars(new)[name], value)), name)
    assert type(new.table) is defaultdict
    assert type(new.past) is deque
    assert new.past.maxlen == 3
    assert all(vars(new)[name] is value for name, value in kept.items())
    assert new.random.random() == old.random.random()
    assert new.numpy.random() == old.numpy.random()
    assert torch.equal(torch.rand(2, generator=new.generator), torch.rand(2, generator=old.generator))
    new.tensor += 1
    assert old.tensor[0] == 2  # a copy


@pytest.mark.parametrize(
    ("attributes", "reasons"),
    [
        ({"memory": {0: torch.ones(3)}}, ["Holder.memory may belong to DDP's buckets of gradients"]),
        ({"count": torch.ones(1), "steps": 3}, []),
        ({"counter": iter([1, 2])}, ["Holder.counter cannot be saved"]),
        ({"by_parameter": {(1, 2): torch.ones(1)}}, ["Holder.by_parameter cannot be saved"]),
    ],
)
def test_why_a_run_is_not_exact(attributes, reasons):
    new = Holder(memory={0: "untouched"})
    assert resumed(Holder(**attributes), [], new, same_buckets=False) == reasons
    assert new.memory == {0: "untouched"}


def test_another_hook_is_not_exact():
    states = communication.state_of([Holder(steps=1)], [])
    (reason,) = communication.load([], [], states, same_buckets=True, device=CPU)
    assert reason == "the communication hooks had Holder in the saved run, and have no state now"
    assert communication.load([], [], [], same_buckets=True, device=CPU) == []
    assert communication.load([Holder()], [], [], same_buckets=True, device=CPU) == []


def test_going_back_restores_numbers_that_have_changed_since():
    state = Holder(steps=0)
    first = communication.numbers_of([state])
    saved = communication.state_of([state], first)
    state.steps = 4
    communication.load([state], first, saved, same_buckets=True, device=CPU)
    assert state.steps == 0


def test_references_are_not_state_and_a_digest_depends_on_values():
    assert communication.state_of([Holder(module=nn.Linear(1, 1))], []) == [{"kind": "Holder"}]
    digests = [communication.digest([{"a": torch.ones(2, dtype=torch.bfloat16)}, 1]) for _ in range(2)]
    assert digests[0] == digests[1]
    assert communication.digest([torch.ones(1)]) != communication.digest([torch.zeros(1)])
