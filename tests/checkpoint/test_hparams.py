"""Hyperparameters are in checkpoints unchanged, and are loaded through Lightning."""

import copy
import enum
import logging
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import Container, DictConfig, OmegaConf

from tests.checkpoint.test_inert import KINDS, NOTED
from tests.parity import Classifier, data, lightning, lightnings_noise_ignored
from tests.support import make_trainer
from trainer.checkpoint.plain_form import plain
from trainer.common import redaction


class Colour(enum.Enum):
    RED = "red"
    ODD = object()


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Sizes:
    width: int = 3
    more: list[Path] = field(default_factory=lambda: [Path("a/b")])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3), (b"a", b"a"), (np.float64(0.1), 0.1), (np.bool_(True), True), (np.str_("a"), "a"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]), (Path("a/b"), "a/b"), (Colour.RED, "red"), (Colour.ODD, "ODD"),
        (Level.HIGH, 3), (Namespace(lr=np.float64(1)), {"lr": 1.0}), (Sizes(), {"width": 3, "more": ["a/b"]}),
        (timedelta(minutes=2), 120.0), (date(2026, 1, 2), "2026-01-02"), (range(3), [0, 1, 2]),
        ((1, Path("a")), (1, "a")), (torch.float16, torch.float16),
        (OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2}), {"a": [1, {"b": 2}], "c": 2}),
        ({"a": OmegaConf.create([1]), Path("k"): {2}}, {"a": [1], "k": [2]}),
        (OmegaConf.create({"a": "${nowhere}"}), {"a": "${nowhere}"}),
    ],
)  # fmt: skip
def test_objects_with_a_plain_form_are_saved_in_it(value, expected, tmp_path):
    left_out = []
    made = plain(value, "", left_out)
    assert (made, left_out) == (expected, [])
    assert type(made) is type(expected)
    torch.save(made, tmp_path / "x")
    assert torch.load(tmp_path / "x", weights_only=True) == expected


pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`"),  # on purpose
]


class Many(Classifier):
    """Accepts any arguments."""

    def __init__(self, lr=0.5, things=None, loss=None, make=None):
        super().__init__()
        self.save_hyperparameters()


def saved(folder, module, make=make_trainer, **options):
    """The checkpoint of a short run."""
    trainer = make(folder, **options)
    with lightnings_noise_ignored() if make is lightnings else nullcontext():
        trainer.fit(module, data(2))
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def lightnings(folder, **options):
    return lightning(**{"default_root_dir": folder, "max_epochs": 1, **options})


def fingerprint(value):
    """Return type and contents for comparisons."""
    if isinstance(value, torch.nn.Module):
        return type(value), repr(value), {name: weight.tolist() for name, weight in value.state_dict().items()}
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.tolist()
    if isinstance(value, Container):
        return type(value), OmegaConf.to_yaml(value, resolve=False)
    if isinstance(value, partial):
        return type(value), value.func, value.args, value.keywords
    if type(value) is dict:
        return {name: fingerprint(child) for name, child in value.items()}
    if type(value).__eq__ is object.__eq__ and not isinstance(value, type):
        return type(value), repr(getattr(value, "__dict__", None))
    return type(value), value


def test_hyperparameters_are_restored_as_in_lightning(tmp_path):
    kinds = {name: value for name, value in KINDS.items() if name not in ("distribution", "exception", "method")}
    made = []
    for make in (lightnings, make_trainer):
        (tmp_path / make.__name__).mkdir()
        file = saved(tmp_path / make.__name__, Many(things=copy.deepcopy(kinds), loss=KINDS["loss"], make=print), make)
        module = Many.load_from_checkpoint(file, weights_only=False)
        made.append(fingerprint(dict(module.hparams)))
    assert made[0] == made[1]
    assert made[1]["things"].keys() == kinds.keys()
    assert (module.hparams["loss"].delta, module.hparams["make"]) == (3.0, print)
    assert module.hparams["things"]["class"] is KINDS["class"]


class Unnamed(Classifier):
    """Stores hyperparameters that are no argument of its constructor."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"lr": 0.5})


def test_hyperparameters_without_an_argument_have_the_name_none_as_in_lightning(tmp_path):
    for make in (lightnings, make_trainer):
        (tmp_path / make.__name__).mkdir()
        checkpoint = torch.load(saved(tmp_path / make.__name__, Unnamed(), make))
        assert (checkpoint["hparams_name"], checkpoint["hyper_parameters"]["lr"]) == (None, 0.5)


class Uncopied:
    """Can be pickled, but not copied."""

    def __deepcopy__(self, memo):
        raise RuntimeError("Only one of these.")


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if "yperparameter" in record.getMessage()]


def test_objects_in_a_file_are_reported_once_at_the_start(tmp_path, caplog):
    given, heard = {"things": {"path": [Path("a")]}, "loss": torch.nn.HuberLoss(), "make": Many}, []
    says = LambdaCallback(on_train_start=lambda *_: heard.extend(lines_of(caplog)))
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[says])
    with caplog.at_level(logging.INFO):
        trainer.fit(Many(**given), data(2))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    (line,) = lines_of(caplog)
    assert line.startswith(
        f"Hyperparameters of Many are objects: things['path'][0] ({Path.__module__}.PosixPath), loss"
        f" (torch.nn.modules.loss.HuberLoss), make ({__name__}.Many). Checkpoints contain them, but only"
        " Many.load_from_checkpoint(..., weights_only=False)"
    )
    assert heard == [line]


class Broken:
    """Its state is created on request, and cannot be pickled."""

    def __getstate__(self):
        raise ValueError("not now")


@pytest.mark.filterwarnings("ignore:The checkpoint lacks values")
@pytest.mark.filterwarnings("ignore:Attribute 'make' removed from hparams because it cannot be pickled")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_unpicklable_objects_are_named_and_saves_succeed(tmp_path, caplog):
    trainer, path = make_trainer(tmp_path, enable_checkpointing=True), tmp_path / "a.ckpt"
    module = Many(things={"path": Path("a"), "broken": [Sizes(2)]}, loss=torch.nn.ReLU(), make=lambda: 1)
    caplog.set_level(logging.INFO)
    trainer.fit(module, data(2))
    assert "make" not in module.hparams  # as by Lightning
    module.hparams["things"]["broken"][0].more = Broken()
    with pytest.warns(
        UserWarning, match=r"do not contain.*of Many.*things.broken\[0\].more \(tests.checkpoint.test_hp"
    ):
        trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)  # printed once
    (line,) = lines_of(caplog)[1:]
    assert line.endswith(" things of Many is saved in its plain form: it cannot be pickled (ValueError: not now).")
    loaded = Many.load_from_checkpoint(path, weights_only=False)
    assert loaded.hparams["things"] == {"path": "a", "broken": [{"width": 2}]}
    assert isinstance(loaded.hparams["loss"], torch.nn.ReLU)
    with pytest.warns(UserWarning, match=r"not restored: Sizes\.more"):
        make_trainer(tmp_path, max_epochs=2).fit(Many(), data(2), ckpt_path=path)


def test_objects_unsupported_by_the_reader_are_saved_in_their_plain_form(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        file = saved(tmp_path, Many(things=NOTED, loss=torch.nn.ReLU()))
    _, line = lines_of(caplog)
    assert line.endswith("things of Many is saved in its plain form: it could not be read again without running code.")
    loaded = Many.load_from_checkpoint(file, weights_only=False)
    assert (loaded.hparams["things"], type(loaded.hparams["loss"])) == ([1], torch.nn.ReLU)


class ByConfig(Classifier):
    def __init__(self, config):
        super().__init__()
        self._hparams = OmegaConf.create({})
        self._set_hparams(config)
        self._hparams_name = "config"
        self.width = config.width


@pytest.fixture
def token(monkeypatch):
    """The value of an environment variable, which a config uses."""
    monkeypatch.setenv("A_TOKEN", "very-secret")
    redaction.register()
    return str(OmegaConf.create({"token": "${oc.env:A_TOKEN}"}).token)


def test_config_of_omegaconf_comes_back_unresolved(tmp_path, token):
    config = OmegaConf.create({"width": "${more.size}", "more": {"size": 8}, "token": "${oc.env:A_TOKEN}"})
    config.url = "${token}"
    file = saved(tmp_path, ByConfig(config))
    assert token.encode() not in file.read_bytes()
    assert config.url == token  # the run itself has it
    loaded = ByConfig.load_from_checkpoint(file, weights_only=False)
    assert loaded.width == 8
    assert type(loaded.hparams) is DictConfig
    in_file = torch.load(file, weights_only=False)["hyper_parameters"]
    assert OmegaConf.to_container(in_file) == OmegaConf.to_container(config, resolve=False)
    make_trainer(tmp_path, max_epochs=2).fit(ByConfig(config), data(2), ckpt_path=file)


def test_config_with_a_secret_is_saved_as_plain_containers(tmp_path, token, caplog):
    config = OmegaConf.create({"width": "${more.size}", "more": {"size": 8}, "token": token})
    with caplog.at_level(logging.INFO):
        file = saved(tmp_path, ByConfig(config))
    (line,) = lines_of(caplog)
    assert line.startswith("The hyperparameter hparams of ByConfig is saved in its plain form: it contains the value")
    saved_as = torch.load(file, weights_only=True)["hyper_parameters"]
    assert saved_as == {"width": 8, "more": {"size": 8}, "token": "${oc.env:A_TOKEN}"}
    assert ByConfig.load_from_checkpoint(file, weights_only=True).width == 8


def test_object_with_a_secret_is_saved_in_its_plain_form_or_omitted(tmp_path, token):
    address, space = Uncopied(), Namespace(deep=[{"token": f"Bearer {token}"}])
    address.url = "https://me:hunter2@host/"
    config = OmegaConf.create({"token": "${oc.env:A_TOKEN}"})
    module = Many(things={"loss": torch.nn.ReLU(), "texts": [token]}, loss=space, make=config)
    module.hparams.update({"call": partial(print, token), "address": address})
    with pytest.warns(UserWarning, match=r"call \(functools.partial\), address \(tests"):
        file = saved(tmp_path, module)
    written = file.read_bytes()
    assert token.encode() not in written
    assert b"hunter2" not in written
    loaded = torch.load(file, weights_only=False)["hyper_parameters"]
    assert loaded["loss"] == {"deep": [{"token": "Bearer ${oc.env:A_TOKEN}"}]}
    assert (type(loaded["make"]), type(loaded["things"]["loss"])) == (DictConfig, torch.nn.ReLU)
    assert loaded["things"]["texts"] == ["${oc.env:A_TOKEN}"]
    assert "call" not in loaded
