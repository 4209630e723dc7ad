"""Dtypes of optimizer states: a resumed run has those of the uninterrupted run."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn

from tests.mixed_states import LoadsItself, MixedStates, WithoutClosure, Wrapper
from tests.parity import QUIET
from tests.support import (
    Regression,
    SavesAt,
    assert_identical,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    native_fp16,
)
from trainer import CheckpointFiles
from trainer.checkpoint.optimizer_states import dtype_to_load, keep_dtypes

BATCHES = make_batches(6)

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, lr is a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    "mixed": MixedStates,
    "mixed, without closure": WithoutClosure,
    "wrapped twice": partial(Wrapper, inner=partial(Wrapper, inner=MixedStates)),
    "loads itself": LoadsItself,
}
PRECISIONS = ("bf16-true", "32-true", "16-mixed", "bf16-mixed")


class Half(Regression):
    """Batches with the dtype of the weights. Records the dtypes of the optimizer's states at the start of training."""

    def on_train_start(self):
        self.dtypes = [
            {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
            for state in self.trainer.optimizers[0].state.values()
        ]

    def training_step(self, batch, batch_idx):
        return super().training_step([one.to(self.net[0].weight.dtype) for one in batch], batch_idx)


def plugin(precision):
    return native_fp16(init_scale=64.0) if precision == "16-mixed" else precision


def fit(folder, optimizer, precision, *more, ckpt=None, **arguments):
    module = Half(make_net(), optimizer)
    arguments |= {"callbacks": list(more), "enable_checkpointing": bool(more)}
    trainer = make_trainer(folder, precision=plugin(precision), **arguments)
    trainer.fit(module, loader_of(BATCHES), ckpt_path=ckpt)
    return trainer, module


def save_with_lightning(file, optimizer, precision):
    with warnings.catch_warnings(action="ignore"):
        trainer = LightningTrainer(**QUIET, max_epochs=1, precision=precision)
        trainer.fit(Half(make_net(), optimizer), loader_of(BATCHES))
        trainer.save_checkpoint(file)


def end_of(trainer, module):
    return {"weights": dict(module.state_dict()), "optimizers": [one.state_dict() for one in trainer.optimizers]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    precision = "bf16-true" if name != "LBFGS" else "32-true"
    whole = end_of(*fit(tmp_path, OPTIMIZERS[name], precision, SavesAt(tmp_path / "3.ckpt", batches=3)))
    assert_identical(end_of(*fit(tmp_path, OPTIMIZERS[name], precision, ckpt=tmp_path / "3.ckpt")), whole)


@pytest.mark.parametrize(
    ("precision", "form"),
    [("bf16-true", "folder"), ("32-true", "folder"), ("16-mixed", "file"), ("bf16-mixed", "folder")],
)
def test_in_every_precision_from_files_and_folders(tmp_path, precision, form):
    files = partial(CheckpointFiles, sharded=form == "folder")
    whole = end_of(*fit(tmp_path, WithoutClosure, precision, SavesAt(tmp_path / "3.ckpt", batches=3), plugins=files()))
    resumed = fit(tmp_path, WithoutClosure, precision, ckpt=tmp_path / "3.ckpt", plugins=files())
    assert_identical(end_of(*resumed), whole)


SWITCHES = [
    ("32-true", "bf16-true"), ("bf16-true", "32-true"), ("32-true", "16-mixed"), ("16-mixed", "32-true"),
    ("bf16-true", "16-mixed"), ("bf16-mixed", "bf16-true"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The checkpoint has (a|no) loss-scaler state")
@pytest.mark.parametrize(
    ("name", "before", "after", "from_lightning"),
    [
        (name, *SWITCHES[(index + shift) % len(SWITCHES)], bool((index + shift) % 3))
        for index, name in enumerate(("AdamW", "AdamW fused", "SGD momentum", "mixed"))
        for shift in (0, 3)
    ],
)
def test_another_precision_casts_states_that_had_the_dtype_of_the_parameter(
    tmp_path, name, before, after, from_lightning
):
    kinds = {precision: torch.bfloat16 if precision == "bf16-true" else torch.float32 for precision in PRECISIONS}
    optimizer = WithoutClosure if name == "mixed" and not from_lightning else OPTIMIZERS[name]
    if from_lightning and before != "16-mixed":  # Lightning has no such checkpoint on a CPU
        save_with_lightning(tmp_path / "a.ckpt", optimizer, before)
    else:
        fit(tmp_path, optimizer, before)[0].save_checkpoint(tmp_path / "a.ckpt")
    (state, *_) = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]["state"].values()
    expected = {
        key: kinds[after] if value.dtype == kinds[before] and key != "step" else value.dtype
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    optimizer = WithoutClosure if name == "mixed" else optimizer
    _, module = fit(tmp_path, optimizer, after, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert module.dtypes == [expected] * 6


def test_lightnings_checkpoints_keep_their_dtypes(tmp_path):
    save_with_lightning(tmp_path / "a.ckpt", MixedStates, "bf16-true")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    trainer, _ = fit(tmp_path, MixedStates, "bf16-true", ckpt=tmp_path / "a.ckpt")  # completed: trains nothing
    assert_identical([one.state_dict() for one in trainer.optimizers], saved)


class Exports(Half):
    """Exports weights in another dtype than the run's in its checkpoints."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {name: value.float() for name, value in checkpoint["state_dict"].items()}


def test_weights_that_are_saved_in_another_dtype(tmp_path):
    ends = []
    for ckpt_path in (None, tmp_path / "a.ckpt"):
        trainer, module = make_trainer(tmp_path, precision="bf16-true"), Exports(make_net(), MixedStates)
        trainer.fit(module, loader_of(BATCHES), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        ends.append(end_of(trainer, module))
    assert_identical(*ends)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_optimizer_with_quantized_states(tmp_path):
    """Its states are tensors of a subclass, which torch loads on a named device only."""
    optimizers = pytest.importorskip("torchao.optim")

    def run(*callbacks, ckpt=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
        options = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
        trainer = make_trainer(tmp_path, precision="bf16-true", **options)
        trainer.fit(Half(net, partial(optimizers.AdamW8bit, lr=0.01)), loader_of(BATCHES), ckpt_path=ckpt)
        states = trainer.optimizers[0].state.values()
        codes = [one.codes for state in states for one in state.values() if hasattr(one, "codes")]
        return {"weights": dict(net.state_dict()), "codes": codes}

    with torch.compiler.set_stance("force_eager"):  # compiling its step takes seconds
        whole = run(SavesAt(tmp_path / "3.ckpt", batches=3))
        assert len(whole["codes"]) == 2
        assert_identical(run(ckpt=tmp_path / "3.ckpt"), whole)


@pytest.mark.parametrize("key", ["step", "other"])
@pytest.mark.parametrize("kind", [torch.int32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_step_is_loaded_as_torch_loads_it_and_whole_numbers_stay_that(key, kind, options):
    parameter = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.Optimizer([parameter], {"lr": 0.1, **options})
    value = torch.tensor(3, dtype=kind)
    state = {"state": {0: {key: value}}, "param_groups": [{"lr": 0.1, **options, "params": [0]}]}
    with keep_dtypes([optimizer], [state], {parameter: torch.bfloat16}):
        optimizer.load_state_dict(state)
    found = optimizer.state[parameter][key]
    needs_float32 = key == "step" and options and kind is torch.float64
    assert found.dtype is (torch.float32 if needs_float32 else kind)
    assert found == 3


@pytest.mark.parametrize("value", ["text", ("x", 1), frozenset("ab"), {"deep": {"er": "text"}}, None, 2.5])
def test_states_that_are_not_tensors_are_loaded_unchanged(value):
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1)
    state = {"state": {0: {"mine": value}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with keep_dtypes([optimizer], [state], {}):
        optimizer.load_state_dict(state)
    assert_identical(optimizer.state[parameter]["mine"], value)


def test_hooks_of_the_user_see_the_saved_dtypes_and_have_the_last_word():
    parameter = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1)
    seen = []

    def after(optimizer):
        seen.append(optimizer.state[parameter]["new"].dtype)
        optimizer.state[parameter]["new"] = optimizer.state[parameter]["new"].half()

    def before(optimizer, state):
        return {**state, "state": {0: {"new": state["state"][0]["old"]}}}

    hooks = [optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after)]
    state = {"state": {0: {"old": torch.ones(2)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with keep_dtypes([optimizer], [state], {parameter: torch.bfloat16}):
        optimizer.load_state_dict(state)
    assert seen == [torch.float32]
    assert_identical(optimizer.state[parameter], {"new": torch.ones(2, dtype=torch.float16)})
    for hook in hooks:
        hook.remove()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_dtype_of_a_state():
    half, single, byte = torch.bfloat16, torch.float32, torch.uint8
    assert dtype_to_load(torch.zeros(1), single, half) is half
    assert dtype_to_load(torch.zeros(1), half, half) is single
    assert dtype_to_load(torch.zeros(1), None, half) is single
    assert dtype_to_load(torch.zeros(1, dtype=half), half, single) is single
    assert dtype_to_load(torch.zeros(1, dtype=byte), single, half) is byte
    assert dtype_to_load(torch.zeros(1), single, torch.complex64) is single
