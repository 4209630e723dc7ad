"""``strategy="deepspeed"`` on two ranks: the weights of DDP, and the outcome of each step."""

import copy
import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.checkpoint.test_shards import sealed_again
from tests.distributed.setups import Fitted, Saves, Setup, batches_of, only_these_warnings
from tests.support import Payload, loader_of, make_trainer, needs_deepspeed
from trainer import CheckpointFiles, DeepSpeedStrategy
from trainer.callbacks import ActivationCheckpointing, AlignmentAdvisor, GradientAccumulation, ScaleMonitor, Throughput
from trainer.checkpoint.conversion import consolidate
from trainer.cli import main
from trainer.errors import CheckpointError, TrainerError, UnsafeCheckpointError

pytestmark = needs_deepspeed

OFFLOAD = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
STRATEGIES = [{"stage": 1}, {"stage": 2}, {"stage": 3}, OFFLOAD]


SCALING = {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}


class Recorder(Callback):
    """Records each optimizer step."""

    def __init__(self):
        self.outcomes = []
        self.norms = []

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        self.outcomes.append((outcome.skipped, outcome.scale, outcome.next_scale, optimizer.param_groups[0]["lr"]))
        self.norms.append(None if outcome.grad_norm is None else outcome.grad_norm.item())


def trainer_of(strategy, callbacks=(), **arguments):
    """Return a Trainer for all ranks. A mapping contains the arguments of a ``DeepSpeedStrategy``."""
    precision = arguments.get("precision")
    if precision == "16-mixed":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True  # on a slow machine any of them may
    if isinstance(strategy, Mapping):
        scaling = SCALING if precision == "16-mixed" and "loss_scale" not in strategy else {}
        strategy = DeepSpeedStrategy(**strategy, **scaling)
    defaults = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "max_epochs": 2}
    devices = torch.distributed.get_world_size()
    return make_trainer(None, devices=devices, strategy=strategy, callbacks=[*callbacks], **defaults | arguments)


def loader(count, seed=1):
    """Return the batches of this rank."""
    rank = torch.distributed.get_rank()
    return loader_of(batches_of(range(rank, rank + 1), count, seed))


def fit_rank(setup, strategy, arguments, ckpt_path=None):
    """Fit, test and predict. Returns the results."""
    with only_these_warnings(), warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", "The checkpoint was written inside of an accumulation window")
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides")
        torch.manual_seed(3)
        arguments, recorder = dict(arguments), Recorder()
        given = [one() if isinstance(one, partial) else one for one in arguments.pop("callbacks", ())]
        trainer = trainer_of(strategy, [recorder, *given], **arguments)
        module = Fitted(setup)
        module.test_step = module.predict_step = lambda batch, batch_idx: module.validation_step(batch, batch_idx)
        identity = {name: (id(p), p.dtype, p.device.type) for name, p in module.named_parameters()}
        attributes = {name: set(vars(part)) for name, part in module.named_modules()}
        trainer.fit(module, loader(setup.batches), loader(2, seed=2), ckpt_path=ckpt_path)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        whole = copy.deepcopy(module.net)
        (tested,) = trainer.validate(module, loader(2, seed=2), verbose=False)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "warned": [str(one.message) for one in warned or ()],
        "outcomes": recorder.outcomes, "norms": recorder.norms, "counts": (trainer.global_step, trainer.skipped_steps),
        "val_loss": metrics["val_loss"], "metrics": metrics, "tested": tested["val_loss"],
        "scale": trainer.scaler.get_scale(),
        "is_itself": identity == {name: (id(p), p.dtype, p.device.type) for name, p in module.named_parameters()},
        "left": sorted(
            name for path, part in module.named_modules()
            for name in (set(vars(part)) - attributes[path] - {"forward", "_hparams"})
            | {name for name, hooks in vars(part).items() if "_hooks" in name and hooks}
        ),
        "is_plain": all(type(vars(part)["_parameters"]) is dict for part in whole.modules()),
    }  # fmt: skip


class Unfreeze(Callback):
    """Unfreezes parameters in the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.requires_grad_(trainer.current_epoch > 0)


REFUSED = {
    "Got manual optimization with strategy='deepspeed'": ({"stage": 2}, Setup(manual=True), {}),
    "Got 2 optimizers with strategy='deepspeed'": ({"stage": 2}, Setup(optimizers=2), {}),
    "Got a batch without a loss with": ({"stage": 2}, Setup(none=frozenset({(0, 0, 1), (1, 0, 1)})), {}),
    "Got batches with different weights in an accumulation window":
        ({"stage": 3}, Setup(weighted="number"), {"accumulate_grad_batches": 2}),
    "The set of trained parameters has changed since the fit began, which strategy='deepspeed'":
        ({"stage": 2}, Setup(frozen=True), {"callbacks": [Unfreeze()]}),
    "Got 3 to 5 training batches per process. DeepSpeed needs the same number": ({"stage": 1}, Setup(fewer=(0, 2)), {}),
}  # fmt: skip


def refusals(folder):
    """Return the expected and the real errors of unsupported runs, each followed by a supported one."""
    messages = []
    for expected, (strategy, setup, arguments) in REFUSED.items():
        with only_these_warnings():
            trainer, module, rank = trainer_of(strategy, **arguments), Fitted(setup), torch.distributed.get_rank()
            train = DataLoader(batches_of(range(rank, rank + 1), setup.batches_of(rank)), batch_size=None)
            messages.append((expected, error_of(lambda: trainer.fit(module, train))))  # noqa: B023
    with only_these_warnings():
        trainer, module = trainer_of({"stage": 2}, max_epochs=1), Fitted(Setup())
        trainer.fit(module, loader(2))
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        error = error_of(lambda: trainer.save_checkpoint(f"{folder}/whole.ckpt"))
    return [*messages, ("DeepSpeed released the optimizer states at the end of the run", error)]


def error_of(run):
    """Return the message of the error."""
    try:
        run()
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save(setup, strategy, form, folder, arguments):
    """Fit, and write ``folder/batch_2.ckpt`` as a ``"file"`` or a ``"folder"``."""
    more = {"plugins": [CheckpointFiles(sharded=form == "folder")], "enable_checkpointing": True}
    return fit_rank(setup, strategy, {**arguments, **more, "callbacks": [Saves(folder, batches=[2])]})


def evaluate(strategy):
    """Return the mean loss over three batches of one rank and one batch of the other, or the error."""
    count = 1 + 2 * (torch.distributed.get_rank() == 0)
    with only_these_warnings():
        trainer, seen = trainer_of(strategy), []
        message = error_of(lambda: seen.extend(trainer.validate(Fitted(Setup()), loader(count, seed=2), verbose=False)))
    return seen[0]["val_loss"] if seen else message


def end_by_signal(folder):
    """End a fit by a signal in the second batch of one rank. Returns its steps."""

    def kill(trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the other rank receives the flag meanwhile

    callbacks = [LambdaCallback(on_train_batch_end=kill), ModelCheckpoint(folder, every_n_epochs=5)]
    with only_these_warnings():
        trainer = trainer_of({"stage": 2}, callbacks, enable_checkpointing=True)
        with suppress(SystemExit):
            trainer.fit(Fitted(Setup()), loader(5), loader(2, seed=2))
    return trainer.global_step


class OnMeta(Fitted):
    """Creates its layers on the meta device."""

    def __init__(self):
        super().__init__(Setup(optimizer="adamw"))
        self.net = None

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def init_weights(self):
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
            parameter.data.copy_(torch.sin(values + number))


def fit_on_meta(strategy):
    """Return the weights of a module created on the meta device."""
    with only_these_warnings():
        trainer_of(strategy, max_epochs=1).fit(module := OnMeta(), loader(4), loader(2, seed=2))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def ranks(ranks_with_deepspeed):
    return ranks_with_deepspeed


def fit(ranks, setup, strategy, **arguments):
    ckpt_path = arguments.pop("ckpt_path", None)
    return ranks.call(fit_rank, setup, strategy, arguments, ckpt_path)


SETUPS = [
    (Setup(optimizer="adamw-fused", schedule="step"), {"gradient_clip_val": 0.3}),
    (
        Setup(optimizer="sgd-fused", schedule="epoch", frozen=True),
        {"gradient_clip_val": 0.3, "callbacks": [GradientAccumulation(schedule={0: 2, 1: 3})]},
    ),
]


@pytest.fixture(scope="module")
def by_ddp(ranks):
    return [fit(ranks, setup, "ddp", **arguments)[0] for setup, arguments in SETUPS]


@pytest.mark.parametrize(("number", "strategy"), list(zip((0, 1, 0, 1), STRATEGIES, strict=True)), ids=str)
def test_weights_are_those_of_ddp(ranks, by_ddp, number, strategy):
    (setup, arguments), ddp = SETUPS[number], by_ddp[number]
    for rank in fit(ranks, setup, strategy, **arguments):
        torch.testing.assert_close(rank["weights"], ddp["weights"], rtol=0, atol=1e-6)
        assert rank["outcomes"] == ddp["outcomes"]
        assert rank["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert rank["counts"] == ddp["counts"]
        assert rank["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-5)
        assert rank["tested"] == pytest.approx(rank["val_loss"], rel=1e-6)
        assert rank["is_itself"]
        assert rank["is_plain"]
        assert rank["left"] == []


@pytest.mark.parametrize("strategy", STRATEGIES[:3:2], ids=str)
def test_overflow_on_one_process_skips_on_both(ranks, strategy):
    setup = Setup(optimizer="adamw", schedule="step", overflow=(1, 0, 3))
    first, second = fit(ranks, setup, strategy, precision="16-mixed", gradient_clip_val=100.0)
    assert_continues([second], [first])
    skipped, scales, next_scales, rates = zip(*first["outcomes"], strict=True)
    assert skipped == (False, False, False, True, *[False] * 6)
    assert scales == (1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096)
    assert next_scales == (1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096, 4096)
    assert rates == pytest.approx([0.01 * 0.8 ** (index - (index > 3)) for index in range(10)])  # it waits
    assert first["norms"][3] == float("inf")
    assert all(0.3 < norm < 5.0 for index, norm in enumerate(first["norms"]) if index != 3)
    assert first["counts"] == (10, 1)
    assert first["scale"] == 4096
    assert first["norms"] == second["norms"]
    assert first["is_itself"]  # in float32
    assert first["tested"] == pytest.approx(first["val_loss"], rel=1e-2)


@pytest.mark.representative
def test_scale_that_changes_changes_nothing_else(ranks):
    """DeepSpeed would halve the gradients (and the norm at stage 3) of each step that doubles the scale."""
    setup = Setup(optimizer="sgd")
    changing, fixed = (
        fit(ranks, setup, strategy, precision="16-mixed", callbacks=[ScaleMonitor(every_n_steps=1)])[0]
        for strategy in ({"stage": 3}, {"stage": 3, "loss_scale": 1024.0})
    )
    assert len({outcome[1] for outcome in changing["outcomes"]}) > 2
    assert {outcome[1:3] for outcome in fixed["outcomes"]} == {(1024.0, 1024.0)}
    torch.testing.assert_close(changing["weights"], fixed["weights"], rtol=0, atol=1e-4)
    assert changing["metrics"]["grad_norm_epoch"] == pytest.approx(fixed["metrics"]["grad_norm_epoch"], rel=1e-3)
    assert changing["metrics"]["amp/scale"] == changing["outcomes"][-1][1]


def test_unsupported_features_of_deepspeed_are_refused(ranks, tmp_path):
    for messages in ranks.call(refusals, str(tmp_path)):
        assert all(part in message for part, message in messages), messages


AS_FOLDER = ("stage 2 folder", "stage 3 folder")
PRECISE, SCALED = Setup(optimizer="adamw", schedule="step", frozen=True), Setup(optimizer="adamw", overflow=(1, 1, 2))


def setup_of(name):
    """Return the set-up, strategy and arguments of a name such as ``"stage 2 folder"``. Folders use float16."""
    if name.startswith("ddp"):
        return PRECISE, "ddp", {"gradient_clip_val": 0.3}
    arguments = {"gradient_clip_val": 0.3} | ({"precision": "16-mixed"} if "folder" in name else {})
    return SCALED if "folder" in name else PRECISE, {"stage": int(name.split()[1])}, arguments


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return checkpoints by name, and the results of the fits that wrote them."""
    made = {}
    for name in ("ddp file", "stage 2 file", "stage 3 file", *AS_FOLDER):
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        setup, strategy, arguments = setup_of(name)
        results = ranks.call(save, setup, strategy, name.split()[-1], str(folder), arguments)
        made[name] = str(folder / "batch_2.ckpt"), results
    return made


def assert_continues(resumed, whole, tolerance=0.0):
    for found, expected in zip(resumed, whole, strict=True):
        assert found["outcomes"] == expected["outcomes"]
        assert found["counts"] == expected["counts"]
        assert found["scale"] == expected["scale"]
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=tolerance)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["stage 3 file", "stage 2 folder"])
def test_resumed_run_ends_as_the_whole_one(ranks, saved, name):
    (setup, strategy, arguments), (path, whole) = setup_of(name), saved[name]
    assert_continues(fit(ranks, setup, strategy, ckpt_path=path, **arguments), whole)


@pytest.mark.parametrize(
    ("written", "read"),
    [("ddp file", "stage 3 file"), ("stage 2 file", "ddp file"), ("stage 3 folder", "stage 1 folder")],
)
def test_other_engines_resume_from_its_checkpoint(ranks, saved, written, read):
    (setup, strategy, arguments), (path, whole) = setup_of(read), saved[written]
    resumed = fit(ranks, setup, strategy, ckpt_path=path, **arguments)
    assert_continues(resumed, whole, 1e-3 if "folder" in read else 1e-6)


@pytest.mark.parametrize("name", AS_FOLDER)
def test_folder_becomes_one_file_and_back(ranks, saved, tmp_path, name):
    (folder, expected), file = saved[name], str(tmp_path / "whole.ckpt")
    assert {"manifest.json", "state.ckpt", "latest", "zero_to_fp32.py"} <= set(os.listdir(folder))
    assert main(["consolidate", folder, file]) == 0
    whole = torch.load(file, weights_only=True)
    assert {value.dtype for value in whole["state_dict"].values()} == {torch.float32}
    assert len(whole["optimizer_states"][0]["state"]) == len(whole["state_dict"])
    setup, strategy, arguments = setup_of(name)
    assert_continues(fit(ranks, setup, strategy, ckpt_path=file, **arguments), expected)


def test_untrusted_folder_runs_no_code(ranks, saved, tmp_path):
    name = "stage 2 folder"
    folder = tmp_path / "a.ckpt"
    shutil.copytree(saved[name][0], folder)
    torch.save(Payload(tmp_path / "ran"), next(folder.glob("*_optim_states.pt")))
    with pytest.raises(CheckpointError, match="is damaged"):
        consolidate(folder, tmp_path / "b.ckpt")
    sealed_again(folder)
    with pytest.raises(UnsafeCheckpointError):
        consolidate(folder, tmp_path / "b.ckpt")
    first, second = sorted(ranks.call(error_of, partial(fit_rank, *setup_of(name), str(folder))))
    assert re.match("CheckpointError: .*see the error of another process", first)
    assert re.match("UnsafeCheckpointError: .*posix.system", second)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("stage", "callback"),
    [
        (1, partial(EMAWeightAveraging, decay=0.8)),  # which cannot be sent to a process
        (3, ActivationCheckpointing("Block")),
        (3, Throughput(warmup_batches=1)),
        (2, AlignmentAdvisor(everywhere=True)),
    ],
    ids=["EMA", "checkpointing", "throughput", "alignment"],
)
def test_callbacks_equal_those_under_ddp(ranks, tmp_path, stage, callback):
    ours, ddp = (
        fit(
            ranks, Setup(optimizer="adamw"), strategy, enable_checkpointing=True,
            callbacks=[callback, ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val_loss", save_top_k=2)],
        )[0]
        for name, strategy in (("ours", {"stage": stage}), ("ddp", "ddp"))
    )  # fmt: skip
    torch.testing.assert_close(ours["weights"], ddp["weights"], rtol=0, atol=1e-5)
    assert ours["metrics"].keys() == ddp["metrics"].keys()
    assert ours["outcomes"] == ddp["outcomes"]
    assert ours["left"] == ddp["left"] == []
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"epoch=0.ckpt", "epoch=1.ckpt"}


def test_bfloat16_weights_equal_those_of_ddp(ranks):
    ours, ddp = (fit(ranks, Setup(), one, precision="bf16-mixed")[0] for one in ({"stage": 3}, "ddp"))
    torch.testing.assert_close(ours["weights"], ddp["weights"], rtol=0, atol=2e-2)
    assert ours["outcomes"] == ddp["outcomes"]


def test_evaluation_counts_each_sample_once(ranks):
    ours, ddp, third = (ranks.call(evaluate, one) for one in ({"stage": 2}, "ddp", {"stage": 3}))
    assert ours[0] == pytest.approx(ddp[0])
    assert "Got processes with 1 to 3 validation batches, expected the same number in each" in third[0]


def test_signal_ends_both_at_the_same_batch_and_saves(ranks, tmp_path):
    first, second = ranks.call(end_by_signal, str(tmp_path))
    assert 2 <= first == second < 5  # which would be an epoch
    (saved,) = tmp_path.glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == first


def test_open_window_is_restarted(ranks, tmp_path):
    """Of batches 0 to 4 in windows of two; saved after batch 2."""
    setup, strategy, arguments = Setup(), {"stage": 2}, {"accumulate_grad_batches": 2, "max_epochs": 1}
    assert ranks.call(save, setup, strategy, "file", str(tmp_path), arguments)[0]["counts"] == (3, 0)
    resumed = fit(ranks, setup, strategy, ckpt_path=str(tmp_path / "batch_2.ckpt"), **arguments)[0]
    assert resumed["counts"] == (2, 0)  # batches 0 and 1; 3 and 4
    assert any("starts another window" in message for message in resumed["warned"])


def test_module_of_the_meta_device_is_filled(ranks):
    first, second = ranks.call(fit_on_meta, {"stage": 3})
    (expected, _) = ranks.call(fit_on_meta, "ddp")
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
