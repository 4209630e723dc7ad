"""``load_weights`` and ``fit(weights=...)``: matching weights are loaded, and the others reported."""

import logging
import sys

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from safetensors.torch import save_file
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_net, make_trainer
from trainer import CheckpointFiles, load_weights
from trainer.errors import CheckpointError, ConfigurationError, UnsafeCheckpointError
from trainer.module_weights import paired

BATCHES = make_batches(3)


class Small(nn.Module):
    """A body, a batch normalization and a head."""

    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, classes)


def small(seed, classes=3):
    torch.manual_seed(seed)
    made = Small(classes)
    made.body[1].running_mean.fill_(float(seed))
    return made


def saved(folder, state):
    torch.save(state, folder / "a.pt")
    return folder / "a.pt"


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "safetensors", "legacy"])
def test_every_kind_of_file(tmp_path, form):
    source, module, file = small(1), small(2), tmp_path / "weights.pt"
    state = source.state_dict()
    if form == "safetensors":
        file = tmp_path / "weights.safetensors"
        save_file(state, file)
    elif form in ("plain", "legacy"):
        torch.save(state, file, _use_new_zipfile_serialization=form == "plain")
    else:
        torch.save({form: state, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}, file)
    loaded = load_weights(module, file)
    assert same(module.state_dict(), state)
    assert loaded.complete
    assert loaded.facts == {
        "path": str(file), "tensors": [9, 9], "parameters": [53, 53], "missing": [], "differing": {}, "unused": [],
        "prefixes": ["", ""],
    }  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
def test_run(tmp_path, sharded):
    saver = ModelCheckpoint(tmp_path / "run" / "checkpoints", save_last=True)
    options = {"callbacks": [saver], "enable_checkpointing": True, "plugins": CheckpointFiles(sharded=sharded)}
    make_trainer(tmp_path, **options).fit(trained := Regression(), loader_of(BATCHES))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_dir() == sharded
    for path in ("run", "run/checkpoints", "run/checkpoints/last.ckpt"):
        module = Regression(make_net(5))
        assert not same(module.state_dict(), trained.state_dict())
        assert load_weights(module, tmp_path / path).complete
        assert same(module.state_dict(), trained.state_dict())


def test_files_that_are_refused(tmp_path):
    module, before = small(2), small(2).state_dict()
    (tmp_path / "text.pt").write_text("no weights")
    torch.save({"loss": 1.0, "epochs": 3}, tmp_path / "numbers.pt")
    torch.save(small(1), tmp_path / "module.pt")
    torch.save(small(1).state_dict(), tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-200])
    save_file(small(1).state_dict(), tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-9])
    (tmp_path / "empty.pt").touch()
    expected = [
        ("text.pt", CheckpointError, "text.pt is not a checkpoint: torch.save did not write this file"),
        ("numbers.pt", CheckpointError, "has no weights: it contains a mapping with the keys loss, epochs. Expected"),
        ("module.pt", UnsafeCheckpointError, "it refers to tests.test_module_weights.Small"),
        ("cut.pt", CheckpointError, "is damaged: it was cut short"),
        ("cut.safetensors", CheckpointError, "cannot be read as a checkpoint; it may be cut short"),
        ("empty.pt", CheckpointError, "is damaged: it is empty"),
        ("whole", ConfigurationError, "there is no such file or folder. Did you mean 'whole.pt'?"),
        ("", ConfigurationError, "a folder without checkpoints"),
        ("https://example.org/a.pt", ConfigurationError, "expected a file or folder of this machine. Fetch it first."),
    ]
    for name, kind, message in expected:
        with pytest.raises(kind) as caught:
            load_weights(module, name if "://" in name else tmp_path / name)
        assert message in str(caught.value)
    assert same(module.state_dict(), before)


def test_custom_file_may_contain_more(tmp_path):
    file, module = saved(tmp_path, {"state_dict": small(1).state_dict(), "of": Small}), small(2)
    with pytest.raises(UnsafeCheckpointError, match="pass weights_only=False"):
        load_weights(module, file)
    with pytest.warns(UserWarning, match="can run any code"):
        load_weights(module, file, weights_only=False)
    assert same(module.state_dict(), small(1).state_dict())


def test_without_safetensors(tmp_path, monkeypatch):
    save_file(small(1).state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: False)
    with pytest.raises(ConfigurationError, match="not installed: pip install safetensors"):
        load_weights(small(2), tmp_path / "a.safetensors")


# --- matching ---------------------------------------------------------------------------------------------------------


def test_differing_weights_are_kept_and_reported(tmp_path):
    state = small(1, classes=7).state_dict()
    del state["body.0.bias"]
    state |= {"body.0.weight": torch.ones(5, 4, dtype=torch.int8), "aux.scale": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    module, before = small(2), small(2).state_dict()
    loaded = load_weights(module, tmp_path / "a.pt")
    assert (loaded.complete, loaded.missing, loaded.unused) == (False, ("body.0.bias",), ("aux.scale",))
    assert loaded.parameters == (10, 53)
    first, differing, missing, unused = str(loaded).splitlines()
    assert first == f"Weights from {tmp_path / 'a.pt'}: 5 of 9 tensors, 10 of 53 parameters."
    assert "because they differ: body.0.weight is int8 in the file and float32 in the module; head.weight" in differing
    assert missing == "  Left as they were, because the file does not have them: body.0.bias."
    assert unused == "  Not used, because the module does not have them: aux.scale."
    after = module.state_dict()
    for name in after:
        source = state if name in loaded.loaded else before
        assert torch.equal(after[name], source[name]), name


@pytest.mark.parametrize(
    ("in_file", "in_module", "expected"),
    [
        ("model.", "", "Names in the file start with 'model.', those of the module do not."),
        ("state.model.", "", "Names in the file start with 'state.model.', those of the module do not."),
        ("", "net.", "Names in the module start with 'net.', those of the file do not."),
        ("net.", "model.", "Names in the file start with 'net.', those of the module with 'model.'."),
    ],
)
def test_names_that_begin_differently(tmp_path, in_file, in_module, expected):
    source = small(1).state_dict()
    torch.save({f"{in_file}{name}": value for name, value in source.items()} | {"other": torch.ones(1)}, tmp_path / "a")
    module = small(2) if not in_module else nn.ModuleDict({in_module[:-1]: small(2), "loss": nn.Linear(1, 1)})
    loaded = load_weights(module, tmp_path / "a")
    assert loaded.prefixes == (in_file, in_module)
    assert expected in str(loaded)
    assert loaded.unused == ("other",)
    assert all(torch.equal(module.state_dict()[f"{in_module}{name}"], value) for name, value in source.items())


def test_same_names_come_first():
    assert paired(["a.b", "b"], ["b"]) == ({"b": "b"}, ("", ""))
    assert paired(["a.b", "a.c", "b"], ["b", "c"]) == ({"b": "a.b", "c": "a.c"}, ("a.", ""))
    assert paired(["a.weight", "b.weight"], ["c.bias", "c.scale"]) == ({}, ("", ""))
    assert paired(["a.weight"], ["c.weight"]) == ({}, ("", ""))  # any layer has one
    assert paired(["a.0.x", "a.0.y", "a.0.z"], ["b.0.x", "b.0.v", "b.0.w"]) == ({}, ("", ""))  # less than the half


def test_prefixes_of_wrappers_in_names_are_ignored(tmp_path):
    source, module, wrapped = small(1), small(2), small(3)
    compiled = {f"_orig_mod.{name.replace('body.', 'body._orig_mod.')}": v for name, v in source.state_dict().items()}
    assert load_weights(module, saved(tmp_path, compiled)).complete
    assert same(module.state_dict(), source.state_dict())
    wrapped.body = torch.compile(wrapped.body)
    assert load_weights(wrapped, saved(tmp_path, source.state_dict())).complete
    assert torch.equal(wrapped.state_dict()["body._orig_mod.0.weight"], source.body[0].weight)


def test_values_are_converted(tmp_path):
    source, module = small(1), small(2)
    loaded = load_weights(module, saved(tmp_path, small(1).half().state_dict()))
    assert module.head.weight.dtype is torch.float32
    assert torch.equal(module.head.weight, source.head.weight.half().float())
    assert loaded.converted == {"float16 to float32": 8}  # and a counter, which is no floating-point number
    assert "Converted: 8 from float16 to float32." in str(loaded)


def test_tied_weights_are_counted_once_and_lazy_ones_take_the_shape_of_the_file(tmp_path):
    def tied():
        made = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        made["head"].weight = made["embedding"].weight
        return made

    source, module, lazy = tied(), tied(), nn.ModuleDict({"embedding": nn.LazyLinear(6, bias=False)})
    torch.save({"embedding.weight": source["embedding"].weight.detach()}, tmp_path / "a.pt")
    loaded = load_weights(module, tmp_path / "a.pt")
    assert (loaded.complete, loaded.parameters) == (True, (24, 24))
    assert torch.equal(module["head"].weight, source["head"].weight)
    assert load_weights(lazy, tmp_path / "a.pt").complete
    assert torch.equal(lazy["embedding"].weight, source["head"].weight)


def test_weights_without_a_match_are_an_error(tmp_path):
    with torch.device("meta"):
        empty = small(1)
    names = "expected body.0.weight, body.0.bias, body.1.weight, body.1.bias and 5 more"
    for module, message in (
        (small(1), rf"has a name of the Small. Got a.weight, a.bias; {names}"),
        (nn.Linear(1, 1, bias=False), r"fits into the Linear: weight is \(2,\) in the file and \(1, 1\)"),
        (nn.Module(), r"without parameters\. If configure_model creates them"),
        (empty, r"meta device.*Trainer.fit\(weights=PATH\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_weights(module, saved(tmp_path, {"a.weight": torch.ones(2), "a.bias": torch.ones(2)}))


# --- fits -------------------------------------------------------------------------------------------------------------


class Seen(Regression):
    """Records the weights at the start of training."""

    def on_train_start(self):
        self.first = {name: value.clone() for name, value in self.state_dict().items()}


class Checked(Seen):
    """Also records those of the sanity check."""

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            self.on_train_start()
            self.checked = self.first


class Late(Checked):
    """Creates its layers in ``configure_model`` on the meta device."""

    def __init__(self):
        super().__init__()
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = make_net()


def weights_file(folder):
    state = Regression(make_net(7)).state_dict()
    return saved(folder, state), state


@pytest.mark.filterwarnings("ignore:precision='16-true' keeps")
@pytest.mark.parametrize(
    ("arguments", "kind", "dtype"),
    [
        ({"callbacks": EMAWeightAveraging(update_starting_at_epoch=5)}, Checked, torch.float32),
        ({"precision": "16-true"}, Checked, torch.float16),
        ({"precision": "bf16-true"}, Checked, torch.bfloat16),
        ({}, Late, torch.float32),
    ],
)
def test_first_steps_of_any_run_have_the_weights(tmp_path, arguments, kind, dtype):
    file, state = weights_file(tmp_path)
    trainer, module = make_trainer(tmp_path, num_sanity_val_steps=1, **arguments), kind()
    trainer.fit(module, loader_of(BATCHES), loader_of(BATCHES), weights=file)
    for weights in (module.first, module.checked):
        assert same(weights, {name: value.to(dtype) for name, value in state.items()})


def test_fit_starts_with_the_weights(tmp_path, caplog):
    file, state = weights_file(tmp_path)
    module, by_hand = Checked(), Regression()
    by_hand.load_state_dict(state)
    trainer = make_trainer(tmp_path)
    logging.getLogger("lightning.pytorch.advice").addHandler(caplog.handler)
    trainer.fit(module, loader_of(BATCHES), loader_of(BATCHES), weights=file)
    logging.getLogger("lightning.pytorch.advice").removeHandler(caplog.handler)
    assert same(module.first, state)
    assert trainer.loaded_weights.complete
    assert f"Weights from {file}: 6 of 6 tensors" in caplog.text
    make_trainer(tmp_path).fit(by_hand, loader_of(BATCHES))
    assert same(module.state_dict(), by_hand.state_dict())
    trainer.validate(module, loader_of(BATCHES), verbose=False)
    assert trainer.loaded_weights.complete
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.fit(module, loader_of(BATCHES), loader_of(BATCHES), ckpt_path=tmp_path / "end.ckpt")
    assert trainer.loaded_weights is None
    assert same(module.state_dict(), by_hand.state_dict())


def test_omitted_weights_are_a_warning_in_the_log(tmp_path, caplog):
    name, *others = (state := Regression().state_dict())
    file = saved(tmp_path, {key: state[key] for key in others})
    make_trainer(tmp_path).fit(Regression(), loader_of(BATCHES), weights=file)
    (record,) = [one for one in caplog.records if one.name == "trainer.lightning.checkpoint_connector"]
    assert record.levelname == "WARNING"
    assert f"because the file does not have them: {name}." in record.message


def test_weights_and_a_checkpoint_are_refused(tmp_path):
    file, _ = weights_file(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Got ckpt_path='a.ckpt' and weights=.*expected one of them"):
        make_trainer(tmp_path).fit(Seen(), loader_of(BATCHES), ckpt_path="a.ckpt", weights=file)
    with pytest.raises(ConfigurationError, match="weights is nowhere: there is no such file"):
        make_trainer(tmp_path).fit(Seen(), loader_of(BATCHES), weights="nowhere")


def test_resumed_run_does_not_load_them_again(tmp_path):
    file, state = weights_file(tmp_path)

    def fit(epochs):
        saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
        options = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": epochs, "resume": "auto"}
        trainer, module = make_trainer(tmp_path, **options), Seen()
        trainer.fit(module, loader_of(BATCHES), weights=file)
        return trainer, module

    first, before = fit(1)
    assert same(before.first, state)
    assert first.loaded_weights is not None
    second, after = fit(2)
    assert same(after.first, before.state_dict())
    assert second.loaded_weights is None
    assert second.global_step == 2 * len(BATCHES)
