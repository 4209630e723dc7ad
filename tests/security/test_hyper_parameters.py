"""Hyperparameters may be objects; no code of a malicious file runs."""

from __future__ import annotations

import pickle
import zipfile
from io import BytesIO

import pytest
import torch

from tests.parity import Classifier, data
from tests.support import make_trainer
from trainer.checkpoint import inert as module_of_inert
from trainer.checkpoint.inert import StandIn, allow_stand_ins, load_inert

ran = []


def boom(*arguments, **named):
    ran.append(arguments)
    return {}


class Evil:
    """Records every operation on it."""

    def __new__(cls, *arguments):
        ran.append("__new__")
        return object.__new__(cls)

    def __setstate__(self, state):
        ran.append("__setstate__")

    def __setitem__(self, key, value):
        ran.append("__setitem__")

    def append(self, item):
        ran.append("append")

    def __hash__(self):
        ran.append("__hash__")
        return 1

    def __eq__(self, other):
        ran.append("__eq__")
        return True


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()
    before = set(torch.serialization.get_safe_globals())
    yield
    assert ran == []
    assert set(torch.serialization.get_safe_globals()) == before


HERE = __name__.encode()
BOOM, EVIL = b"c" + HERE + b"\nboom\n", b"c" + HERE + b"\nEvil\n"


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def name(where, what):
    return f"c{where}\n{what}\n".encode()


def reduced(function, *arguments):
    return function + b"(" + b"".join(arguments) + b"tR"


STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x03tQ"
TENSOR = STORAGE + b"K\x00(K\x03t(K\x01t\x89" + reduced(name("collections", "OrderedDict"))

ATTACKS = {
    "a call": reduced(BOOM, text("x")),
    "eval": reduced(name("builtins", "eval"), text(f"__import__('{__name__}', fromlist='boom').boom()")),
    "a name in a module that is not loaded": name("antigravity", "fly"),
    "getattr": reduced(reduced(name("builtins", "getattr"), BOOM, text("__call__")), text("x")),
    "a dotted name": reduced(name("torch._utils", "_rebuild_tensor_v2.__globals__.get"), text("os")),
    "a new object": EVIL + b")\x81",
    "its state": EVIL + b")\x81}" + text("a") + b"K\x01sb",
    "its slots": EVIL + b")\x81N}" + text("__class__") + name("builtins", "int") + b"s\x86b",
    "state for a function of torch": name("torch._utils", "_rebuild_tensor_v2") + b"}" + text("a") + b"K\x01sb",
    "state for a dict": b"}N}" + text("__class__") + EVIL + b"s\x86b",
    "items": EVIL + b")\x81K\x01K\x02s",
    "entries": EVIL + b")\x81K\x01a",
    "a key": b"}" + EVIL + b")\x81K\x01s",
    "two equal keys": b"}(" + EVIL + b")\x81K\x01" + EVIL + b")\x81K\x01u",
    "a stack global": b"\x8c" + bytes([len(HERE)]) + HERE + b"\x8c\x04boom\x93)R",
    "a new object with names": EVIL + b")}\x92",
    "a storage of a kind of its own": b"(" + text("storage") + EVIL + text("0") + text("cpu") + b"K\x03tQ",
    "a storage in a place of its own": b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + EVIL
    + b"K\x03tQ",
    "a persistent text": b"Pboom\n",
    "a tensor of a kind of its own": reduced(
        name("torch._tensor", "_rebuild_from_type_v2"), BOOM, EVIL, b"(K\x01t", b"}"
    ),
    "a tensor that becomes another": reduced(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        EVIL,
        b"(" + TENSOR + b"t",
        b"}",
    ),
    "a tensor with slots": reduced(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        b"(" + TENSOR + b"t",
        b"}}" + text("__class__") + EVIL + b"s\x86",
    ),
    "a wrapper": reduced(name("torch._utils", "_rebuild_wrapper_subclass"), EVIL, *[b"N"] * 7),
    "a set of it": reduced(name("builtins", "set"), b"]" + EVIL + b")\x81a"),
    "bytes by a codec": reduced(name("_codecs", "encode"), text("x"), EVIL + b")\x81"),
    "the name of a stand-in": name("trainer.checkpoint.inert", "StandIn") + b")\x81",
    "an end in between": reduced(BOOM) + b".",
    "cut short": BOOM + b"(",
}  # fmt: skip


def pickled(hyper_parameters, state_dict=b"}"):
    entries = text("state_dict") + state_dict + text("hyper_parameters") + hyper_parameters
    return b"\x80\x02}(" + entries + b"u."


def archive(data, *others):
    good, evil = BytesIO(), BytesIO()
    torch.save({"a": torch.ones(3)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w", zipfile.ZIP_STORED) as target:
        for item in source.infolist():
            target.writestr(item, data if item.filename.endswith("data.pkl") else source.read(item))
        for place, content in others:
            target.writestr(place, content)
    return evil


def attempt(file):
    """Return the result of our reader, or None if it raises."""
    try:
        with allow_stand_ins(file):
            file.seek(0)
            return torch.load(file, weights_only=True)
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("attack", ATTACKS)
def test_pickles_run_no_code(attack):
    checkpoint = attempt(archive(pickled(ATTACKS[attack])))
    assert checkpoint is None or checkpoint["state_dict"] == {}
    assert ran == []
    assert "antigravity" not in __import__("sys").modules
    # other places refuse it, as without stand-ins
    file = archive(pickled(b"}", state_dict=ATTACKS[attack]))
    with pytest.raises(Exception):  # noqa: B017, PT011
        torch.load(file, weights_only=True)
    assert attempt(file) is None


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickles_of_each_protocol_run_no_code(protocol):
    file = BytesIO()

    class Called:
        def __reduce__(self):
            return boom, ("x",), {"a": 1}, iter([1]), iter([("k", 1)])

    torch.save({"state_dict": {}, "hyper_parameters": {"it": Called()}}, file, pickle_protocol=protocol)
    attempt(file)


def test_stand_ins_are_only_in_hyperparameters():
    taken_out = pickled(EVIL + b")\x81q\x07", state_dict=b"}")[:-2] + text("callbacks") + b"h\x07u."
    assert attempt(archive(taken_out)) is None
    made_before = pickled(b"h\x07", state_dict=EVIL + b")\x81q\x07")
    assert attempt(archive(made_before)) is None
    by_two_keys = pickled(EVIL + b")\x81", state_dict=b"}")[:-2] + text("hyper_parameters") + b"}u."
    assert attempt(archive(by_two_keys)) is None


BENIGN, CALL = pickled(b"}"), pickled(reduced(BOOM))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "file",
    [
        lambda: archive(BENIGN, ("archive/data.pkl", CALL)),
        lambda: archive(CALL, ("archive/data.pkl", BENIGN)),
        lambda: archive(BENIGN, ("other/data.pkl", CALL)),
        lambda: archive(BENIGN, ("archive/inner/data.pkl", CALL), ("archive/inner.zip", archive(CALL).getvalue())),
        lambda: archive(BENIGN, ("archive/constants.pkl", CALL), ("archive/code/a.py", b"boom()")),
        lambda: BytesIO(CALL + archive(BENIGN).getvalue()),
        lambda: BytesIO(CALL),
        lambda: legacy(),
    ],
)
def test_every_kind_of_archive(file):
    checkpoint = attempt(file())
    assert checkpoint is None or set(checkpoint) == {"state_dict", "hyper_parameters"}


def legacy():
    file = BytesIO()

    class Called:
        def __reduce__(self):
            return boom, ()

    torch.save({"hyper_parameters": Called()}, file, _use_new_zipfile_serialization=False)
    return file


def test_legacy_format_is_read_by_torchs_rules(tmp_path):
    """A file of torch before 1.6 gets no stand-ins."""
    (tmp_path / "evil.ckpt").write_bytes(legacy().getvalue())
    with pytest.raises(pickle.UnpicklingError, match="boom was not an allowed global"):
        load_inert(tmp_path / "evil.ckpt")
    torch.save({"a": torch.ones(2)}, tmp_path / "good.ckpt", _use_new_zipfile_serialization=False)
    assert load_inert(tmp_path / "good.ckpt")["a"].tolist() == [1, 1]


def test_outline_that_is_wrong_does_no_harm(monkeypatch):
    """A malicious file shows the scan another content than torch; all names are replaced by stand-ins."""
    outline = module_of_inert._Outline.__init__

    def wrong(self, file):
        outline(self, file)
        names = [f"{__name__}.boom", f"{__name__}.Evil", "builtins.eval", "os.system", "builtins.getattr"]
        self._calls = {
            type("_ObjectCall", (module_of_inert._ObjectCall,), {"names": (name,), "kind": kind})
            for name, kind in zip(names, [None, None, list, dict, getattr], strict=True)
        }

    monkeypatch.setattr(module_of_inert._Outline, "__init__", wrong)
    for attack in ATTACKS.values():
        attempt(archive(pickled(attack)))
        attempt(archive(pickled(b"}", state_dict=attack)))


class Reads(Classifier):
    def on_load_checkpoint(self, checkpoint):
        self.read = checkpoint["hyper_parameters"]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_trainer_passes_them_over(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(Reads(), data(2))

    class Called:
        def __reduce__(self):
            return boom, ("x",), {"a": 1}

    file = tmp_path / "evil.ckpt"
    torch.save(
        trainer._checkpoint_connector.dump_checkpoint() | {"hyper_parameters": {"it": Called(), "lr": 0.5}}, file
    )
    module = Reads()
    make_trainer(tmp_path, max_epochs=2).fit(module, data(2), ckpt_path=file)
    assert isinstance(module.read["it"], StandIn)
    assert module.read["lr"] == 0.5
    with pytest.raises(pickle.UnpicklingError):
        Reads.load_from_checkpoint(file, weights_only=True)
