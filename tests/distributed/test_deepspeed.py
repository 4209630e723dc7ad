"""``strategy="deepspeed"`` on two ranks: the weights of DDP, and the outcome of each step."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from tests.distributed.ranks import Ranks
from tests.distributed.setups import Setup
from tests.support import needs_deepspeed
from tests.warm_python import WarmPython
from trainer.callbacks import ActivationCheckpointing, AlignmentAdvisor, GradientAccumulation, ScaleMonitor, Throughput
from trainer.checkpoint.conversion import consolidate
from trainer.checkpoint.sharded_files import read_manifest, seal
from trainer.cli import main
from trainer.errors import CheckpointError, UnsafeCheckpointError

pytestmark = needs_deepspeed

OFFLOAD = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
STRATEGIES: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 3}, OFFLOAD]


@pytest.fixture(scope="module")
def ranks(python: WarmPython) -> Iterator[Ranks]:
    with Ranks(python, 2, timeout=120.0) as ranks:
        yield ranks


def fit(ranks: Ranks, setup: Setup, strategy: Any, **arguments: Any) -> list[dict[str, Any]]:
    ckpt_path = arguments.pop("ckpt_path", None)
    return ranks.call("tests.distributed.deepspeed_worker:fit", setup, strategy, arguments, ckpt_path)


SETUPS: list[tuple[Setup, dict[str, Any]]] = [
    (Setup(optimizer="adamw-fused", schedule="step"), {"gradient_clip_val": 0.3}),
    (
        Setup(optimizer="sgd-fused", schedule="epoch", frozen=True),
        {"gradient_clip_val": 0.3, "callbacks": [GradientAccumulation(schedule={0: 2, 1: 3})]},
    ),
]


@pytest.fixture(scope="module")
def by_ddp(ranks: Ranks) -> list[dict[str, Any]]:
    return [fit(ranks, setup, "ddp", **arguments)[0] for setup, arguments in SETUPS]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_weights_are_those_of_ddp(ranks: Ranks, by_ddp: list[Any], number: int, strategy: dict[str, Any]) -> None:
    (setup, arguments), ddp = SETUPS[number], by_ddp[number]
    for rank in fit(ranks, setup, strategy, **arguments):
        for name, value in ddp["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-6)
        assert rank["outcomes"] == ddp["outcomes"]
        assert rank["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert rank["counts"] == ddp["counts"]
        assert rank["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-5)
        assert rank["tested"] == pytest.approx(rank["val_loss"], rel=1e-6)
        assert rank["is_itself"]
        assert rank["is_plain"]
        assert rank["left"] == []


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=str)
def test_overflow_on_one_process_skips_on_both(ranks: Ranks, strategy: dict[str, Any]) -> None:
    setup = Setup(optimizer="adamw", schedule="step", overflow=(1, 0, 3))
    first, second = fit(ranks, setup, strategy, precision="16-mixed", gradient_clip_val=100.0)
    skipped, scales, next_scales, rates = zip(*first["outcomes"], strict=True)
    assert skipped == (False, False, False, True, *[False] * 6)
    assert scales == (1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096)
    assert next_scales == (1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 4096, 4096)
    assert rates == pytest.approx([0.01 * 0.8 ** (index - (index > 3)) for index in range(10)])  # it waits
    assert first["norms"][3] == float("inf")
    assert all(0.3 < norm < 5.0 for index, norm in enumerate(first["norms"]) if index != 3)
    assert first["counts"] == second["counts"] == (10, 1)
    assert first["scale"] == 4096
    for key in ("outcomes", "norms"):
        assert first[key] == second[key]
    for name, value in first["weights"].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, second["weights"][name])
    assert first["is_itself"]
    assert first["tested"] == pytest.approx(first["val_loss"], rel=1e-2)


@pytest.mark.representative
def test_scale_that_changes_changes_nothing_else(ranks: Ranks) -> None:
    """DeepSpeed would halve the gradients (and the norm at stage 3) of each step that doubles the scale."""
    setup = Setup(optimizer="sgd")
    changing, fixed = (
        fit(ranks, setup, strategy, precision="16-mixed", callbacks=[ScaleMonitor(every_n_steps=1)])[0]
        for strategy in ({"stage": 3}, {"stage": 3, "loss_scale": 1024.0})
    )
    assert len({outcome[1] for outcome in changing["outcomes"]}) > 2
    assert {outcome[1:3] for outcome in fixed["outcomes"]} == {(1024.0, 1024.0)}
    for name, value in fixed["weights"].items():
        torch.testing.assert_close(changing["weights"][name], value, rtol=0, atol=1e-4)
    assert changing["metrics"]["grad_norm_epoch"] == pytest.approx(fixed["metrics"]["grad_norm_epoch"], rel=1e-3)
    assert changing["metrics"]["amp/scale"] == changing["outcomes"][-1][1]


def test_unsupported_features_of_deepspeed_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.call("tests.distributed.deepspeed_worker:refusals", str(tmp_path)):
        for sentence, part in zip(
            said,
            (
                "Got manual optimization with strategy='deepspeed'",
                "Got 2 optimizers with strategy='deepspeed'",
                "Got a batch without a loss with strategy='deepspeed'",
                "Got batches with different weights in an accumulation window",
                "Got 2 as the dataloader's batch size and 'train_micro_batch_size_per_gpu': 3 in the DeepSpeed config",
                "Other parameters are trained than when the fit began, with strategy='deepspeed'",
                "Got 3 to 5 training batches in a process. DeepSpeed needs as many in each",
                "DeepSpeed released the optimizer states at the end of the run",
            ),
            strict=True,
        ):
            assert part in sentence


@dataclass(frozen=True)
class Saved:
    """A fit that has written a checkpoint."""

    place: Path
    seen: list[dict[str, Any]]


AS_FOLDER = ("stage 1 folder", "stage 2 folder", "stage 3 folder")
PRECISE, SCALED = Setup(optimizer="adamw", schedule="step", frozen=True), Setup(optimizer="adamw", overflow=(1, 1, 2))


def setup_of(name: str) -> tuple[Setup, Any, dict[str, Any]]:
    """Return the set-up, strategy and arguments of a name such as ``"stage 2 folder"``. Folders use float16."""
    if name.startswith("ddp"):
        return PRECISE, "ddp", {"gradient_clip_val": 0.3}
    arguments = {"gradient_clip_val": 0.3} | ({"precision": "16-mixed"} if "folder" in name else {})
    return SCALED if "folder" in name else PRECISE, {"stage": int(name.split()[1])}, arguments


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    made = {}
    for name in ("ddp file", "stage 2 file", "stage 3 file", *AS_FOLDER):
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        setup, strategy, arguments = setup_of(name)
        seen = ranks.call(
            "tests.distributed.deepspeed_worker:save", setup, strategy, name.split()[-1], str(folder), arguments
        )
        made[name] = Saved(folder / "batch_2.ckpt", seen)
    return made


def assert_goes_on(resumed: list[dict[str, Any]], whole: list[dict[str, Any]], tolerance: float = 0.0) -> None:
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine["outcomes"] == theirs["outcomes"][3:]
        assert mine["counts"] == theirs["counts"]
        assert mine["scale"] == theirs["scale"]
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], abs=tolerance)
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["stage 2 file", "stage 3 file", *AS_FOLDER])
def test_resumed_run_ends_as_the_whole_one(ranks: Ranks, saved: dict[str, Saved], name: str) -> None:
    setup, strategy, arguments = setup_of(name)
    resumed = fit(ranks, setup, strategy, ckpt_path=str(saved[name].place), **arguments)
    assert_goes_on(resumed, saved[name].seen)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("ddp file", "stage 2 file"),
        ("ddp file", "stage 3 file"),
        ("stage 2 file", "ddp file"),
        ("stage 3 file", "ddp file"),
    ],
)
def test_other_engines_resume_from_its_checkpoint(
    ranks: Ranks, saved: dict[str, Saved], written: str, read: str
) -> None:
    setup, strategy, arguments = setup_of(read)
    resumed = fit(ranks, setup, strategy, ckpt_path=str(saved[written].place), **arguments)
    assert_goes_on(resumed, saved[written].seen, 1e-6)


@pytest.mark.parametrize(
    ("written", "read"), [("stage 2 folder", "stage 3 folder"), ("stage 3 folder", "stage 1 folder")]
)
def test_another_stage_resumes_from_a_folder(ranks: Ranks, saved: dict[str, Saved], written: str, read: str) -> None:
    setup, strategy, arguments = setup_of(read)
    resumed = fit(ranks, setup, strategy, ckpt_path=str(saved[written].place), **arguments)
    assert_goes_on(resumed, saved[written].seen, 1e-3)


@pytest.mark.parametrize("name", AS_FOLDER)
def test_folder_becomes_one_file_and_back(ranks: Ranks, saved: dict[str, Saved], tmp_path: Path, name: str) -> None:
    folder, file = saved[name].place, tmp_path / "whole.ckpt"
    assert {"manifest.json", "state.ckpt", "latest", "zero_to_fp32.py"} <= {path.name for path in folder.iterdir()}
    assert main(["consolidate", str(folder), str(file)]) == 0
    whole = torch.load(file, weights_only=True)
    assert {value.dtype for value in whole["state_dict"].values()} == {torch.float32}
    assert len(whole["optimizer_states"][0]["state"]) == len(whole["state_dict"])
    setup, strategy, arguments = setup_of(name)
    assert_goes_on(fit(ranks, setup, strategy, ckpt_path=str(file), **arguments), saved[name].seen)


@pytest.mark.parametrize("name", AS_FOLDER)
def test_strangers_folder_runs_no_code(ranks: Ranks, saved: dict[str, Saved], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a.ckpt"
    shutil.copytree(saved[name].place, folder)
    damaged = next(folder.glob("*_optim_states.pt"))
    torch.save(Payload(tmp_path / "ran"), damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        consolidate(folder, tmp_path / "b.ckpt")
    manifest = read_manifest(folder)  # an attacker who can write the file can write its checksum
    content = damaged.read_bytes()
    sums = {**manifest.files, damaged.name: (len(content), hashlib.sha256(content).hexdigest())}
    (folder / "manifest.json").unlink()
    seal(folder, folder.name, sums, manifest.facts)
    with pytest.raises(UnsafeCheckpointError):
        consolidate(folder, tmp_path / "b.ckpt")
    setup, strategy, arguments = setup_of(name)
    call = "tests.distributed.deepspeed_worker:cannot_resume"
    first, second = sorted(ranks.call(call, setup, strategy, arguments, str(folder)))
    assert first.startswith("CheckpointError")
    assert "see the error of another process" in first
    assert second.startswith("UnsafeCheckpointError")
    assert "posix.mkdir" in second
    assert not (tmp_path / "ran").exists()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


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
def test_callbacks_equal_those_under_ddp(ranks: Ranks, tmp_path: Path, stage: int, callback: Any) -> None:
    ours, ddp = (
        fit(
            ranks, Setup(optimizer="adamw"), strategy, enable_checkpointing=True,
            callbacks=[callback, ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val_loss", save_top_k=2)],
        )[0]
        for name, strategy in (("ours", {"stage": stage}), ("ddp", "ddp"))
    )  # fmt: skip
    for name, value in ddp["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=1e-5)
    assert ours["metrics"].keys() == ddp["metrics"].keys()
    assert ours["outcomes"] == ddp["outcomes"]
    assert ours["left"] == ddp["left"] == []
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"epoch=0.ckpt", "epoch=1.ckpt"}


def test_bfloat16_weights_equal_those_of_ddp(ranks: Ranks) -> None:
    ours, ddp = (fit(ranks, Setup(), one, precision="bf16-mixed")[0] for one in ({"stage": 3}, "ddp"))
    for name, value in ddp["weights"].items():
        assert ours["weights"][name].dtype == torch.float32
        torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=2e-2)
    assert ours["outcomes"] == ddp["outcomes"]


def test_evaluation_counts_each_sample_once(ranks: Ranks) -> None:
    ours, ddp, third = (
        ranks.call("tests.distributed.deepspeed_worker:evaluate", one) for one in ({"stage": 2}, "ddp", {"stage": 3})
    )
    assert ours[0] == pytest.approx(ddp[0])
    assert "Got 1 to 3 batches of validation in a process. At stage 3 of DeepSpeed's ZeRO" in third[0]


def test_signal_ends_both_at_the_same_batch_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.call("tests.distributed.deepspeed_worker:end_by_signal", str(tmp_path))
    assert 2 <= first == second < 5  # which would be an epoch
    (saved,) = tmp_path.glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == first


def test_open_window_is_restarted(ranks: Ranks, tmp_path: Path) -> None:
    """Of batches 0 to 4 in windows of two; saved after batch 2."""
    setup, strategy, arguments = Setup(), {"stage": 2}, {"accumulate_grad_batches": 2, "max_epochs": 1}
    call = "tests.distributed.deepspeed_worker:save"
    assert ranks.call(call, setup, strategy, "file", str(tmp_path), arguments)[0]["counts"] == (3, 0)
    resumed = fit(ranks, setup, strategy, ckpt_path=str(tmp_path / "batch_2.ckpt"), **arguments)[0]
    assert resumed["counts"] == (2, 0)  # batches 0 and 1; 3 and 4
    assert any("starts another window" in said for said in resumed["warned"])


def test_module_of_the_meta_device_is_filled(ranks: Ranks) -> None:
    first, second = ranks.call("tests.distributed.deepspeed_worker:fit_on_meta", {"stage": 3})
    (expected, _) = ranks.call("tests.distributed.deepspeed_worker:fit_on_meta", "ddp")
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)
        assert torch.equal(first[name], second[name])
