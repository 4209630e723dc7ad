"""Methods that a run replaces on objects."""

import copy
import pickle

import pytest
import torch

from trainer.common.session import Session


class Owner:
    def method(self):
        return "class"


def test_methods_are_restored_in_reverse_order():
    owner, other = Owner(), Owner()
    owner.method = first = lambda: "user"
    with Session() as session:
        session.replace(owner, "method", lambda: "one")
        session.replace(owner, "method", lambda: "two")
        session.replace(other, "method", lambda: "other")
        assert (owner.method(), other.method(), Owner().method()) == ("two", "other", "class")
    assert owner.method is first
    assert vars(other) == {}


def test_wrapper_of_other_code_stays():
    owner = Owner()
    with Session() as session:
        session.replace(owner, "method", lambda: "ours")
        inner = owner.method
        owner.method = lambda: f"wrapped {inner()}"
    assert owner.method() == "wrapped ours"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))])
def test_copies_restore_nothing(duplicate):
    owner = Owner()
    with Session() as session:
        session.replace(owner, "method", lambda: "ours")
        duplicate(session).close()
        assert owner.method() == "ours"


def test_steps_of_the_given_optimizers_are_watched():
    first, second = (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0) for _ in range(2))
    seen = []
    with Session() as session:
        session.watch_steps(lambda: [first], before=lambda optimizer, *_: seen.append(("before", optimizer is first)))
        session.watch_steps(lambda: [first], after=lambda optimizer, *_: seen.append(("after", optimizer is first)))
        session.watch_steps(after=lambda optimizer, *_: seen.append(("any", optimizer is first)))
        first.step()
        second.step()
    first.step()
    assert seen == [("before", True), ("after", True), ("any", True), ("any", False)]
