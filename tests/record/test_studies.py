"""Optuna studies from other people."""

import os
import pickle
import sys
import types

import numpy as np
import pytest

from tests.support import Payload
from trainer.errors import ConfigurationError
from trainer.record.studies import check_pickles

optuna = pytest.importorskip("optuna")


class CMA:
    """A stand-in for the class of the package cmaes."""

    def __init__(self):
        self.mean, self.sigma = np.zeros(3), np.float64(0.5)


@pytest.fixture
def cmaes(monkeypatch):
    for name in ("cmaes", "cmaes._cma"):
        module = types.ModuleType(name)
        module.CMA, module.os = CMA, os
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(CMA, "__module__", "cmaes._cma")


def study_with(pickled):
    """Return a study as CmaEsSampler writes it: a pickle in pieces, in the attributes of a trial."""
    study = optuna.create_study(study_name="theirs")
    trial = study.ask()
    text = pickled.hex()
    for number in range(0, len(text), 40):
        study._storage.set_trial_system_attr(
            trial._trial_id, f"cma:optimizer:{number // 40}", text[number : number + 40]
        )
    study.ask()
    return study


@pytest.mark.filterwarnings("ignore")
def test_pickles_of_cma_es_are_read(cmaes):
    pickled = pickle.dumps(CMA())
    assert len(pickled.hex()) > 400  # in more than ten pieces
    check_pickles(study_with(pickled))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["a call", "a module's module", "damaged"])
def test_pickles_with_code_are_refused(tmp_path, cmaes, kind):
    proof = tmp_path / "pwned"
    pickled = pickle.dumps(Payload(proof))
    if kind == "a module's module":
        pickled = b"\x80\x04\x8c\x0acmaes._cma\x8c\x09os.system\x93\x8c" + bytes([len(f"touch {proof}")])
        pickled += f"touch {proof}".encode() + b"\x85R."
    if kind == "damaged":
        pickled = pickled[:-5]
    with pytest.raises(ConfigurationError, match=r"study theirs.*CMA-ES"):
        check_pickles(study_with(pickled))
    assert not proof.exists()
