"""Sharded and unsharded checkpoints of two ranks: each strategy resumes from each of them bit for bit."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import checkpoints_worker as worker
from tests.distributed.test_ddp import load, run
from tests.support import assert_identical, needs_fsdp2
from tests.warm_python import WarmPython
from trainer.checkpoint import files
from trainer.checkpoint.manifest import OUR_KEY
from trainer.cli import main

pytestmark = [
    needs_fsdp2,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    """Fits of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            f"single {form}": worker.fit(folder / f"single {form}", "auto", form, worker.Net(), devices=1, max_epochs=2)
            for form in ("folder", "file")
        }


@pytest.fixture(scope="module")
def ranks(python: WarmPython, folder: Path, single: dict[str, Any]) -> list[dict[str, Any]]:
    run(python, folder, "torchrun", script=Path(worker.__file__))
    return load(folder)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare weights and optimizer states bit for bit."""
    assert_identical(one["weights"], other["weights"])
    assert_identical(one["optimizers"], other["optimizers"])


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", worker.SAVED)
def test_two_processes_resume_from_any_checkpoint(
    ranks: list[dict[str, Any]], single: dict[str, Any], name: str, strategy: str
) -> None:
    for rank in ranks:
        assert_equal(rank[f"{name} -> {strategy}"]["start"], {**single, **rank}[name]["end"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", worker.SAVED)
def test_one_process_resumes_from_any_checkpoint(
    ranks: list[dict[str, Any]], single: dict[str, Any], folder: Path, name: str
) -> None:
    saved = {**single, **ranks[0]}[name]
    found = worker.fit(
        folder / "alone", "auto", "file", worker.Net(), devices=1, ckpt=saved["best"], max_epochs=3, exact_resume=False
    )
    assert_equal(found["start"], saved["end"])


@pytest.mark.parametrize("name", worker.OPTIMIZERS)
def test_states_of_all_optimizers(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert_equal(found["start"], found["saved"])
        assert not torch.equal(found["end"]["weights"]["gain"], found["saved"]["weights"]["gain"])


def test_sharded_checkpoint_is_a_folder_of_both(ranks: list[dict[str, Any]]) -> None:
    path = Path(ranks[0]["fsdp folder later"]["best"])
    manifest = files.read_manifest(path)
    assert manifest is not None
    assert sorted(manifest.files) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "state.ckpt",
    ]  # fmt: skip
    assert {"epoch": 1, "step": 10, "weights_only": False}.items() <= manifest.facts.items()
    assert sorted(os.listdir(path.parent)) == ["step=10.ckpt", "step=8.ckpt"]
    assert files.verify(path.parent / "step=8.ckpt")


@pytest.mark.parametrize("name", worker.CACHING)
def test_buffers_that_have_grown_in_each_process(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        whole, resumed = rank[name]["whole"]["end"], rank[name]["resumed"]["end"]
        assert_equal(resumed, whole)
        assert_identical(resumed["buffers"], whole["buffers"])
        assert resumed["buffers"]["past"].shape == (11, 2)
    first, second = (rank[name]["whole"]["end"]["buffers"]["past"] for rank in ranks)
    assert torch.equal(first[:-1], second[:-1]) is name.endswith("ddp")  # the last row was not broadcast yet


@pytest.mark.parametrize("name", worker.SAVED)
def test_best_one_is_tested(ranks: list[dict[str, Any]], single: dict[str, Any], name: str) -> None:
    found = {**single, **ranks[0]}
    assert found[name]["tested"]["loss"] == pytest.approx(found["single file"]["tested"]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", [f"window {form} {each} {bool(none_at)}" for form, none_at, each in worker.WINDOWS])
def test_window_that_was_open_is_gone_on_with(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert_equal(found["resumed"]["end"], found["whole"]["end"])
        assert not torch.equal(found["resumed"]["end"]["weights"]["gain"], found["resumed"]["start"]["weights"]["gain"])


def test_uninterrupted_run_is_gone_on_with(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["fsdp folder -> fsdp"]["end"], rank["fsdp file -> fsdp"]["end"])
        assert_equal(rank["fsdp folder later -> fsdp"]["end"], rank["fsdp file -> fsdp"]["end"])


@pytest.mark.parametrize("name", worker.CONVERTED)
def test_converted_checkpoints_are_resumed(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert_equal(rank[name]["start"], rank["fsdp folder"]["end"])
        assert_equal(rank[name]["end"], rank["fsdp folder -> fsdp"]["end"])


@pytest.mark.parametrize("name", ["fsdp folder", "fsdp folder later", "ddp folder"])
def test_folder_of_two_processes_in_other_forms(ranks: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    saved = ranks[0][name]
    first, folder, second, weights = (str(tmp_path / n) for n in ("a.ckpt", "b.ckpt", "c.ckpt", "w.safetensors"))
    for words in (
        ["consolidate", saved["best"], first], ["shard", first, folder], ["consolidate", folder, second],
        ["export", saved["best"], weights],
    ):  # fmt: skip
        assert main(words) == 0
    for file in (first, second):
        checkpoint = torch.load(file, weights_only=True)
        found = {"weights": checkpoint["state_dict"], "optimizers": checkpoint["optimizer_states"]}
        assert_equal(found, saved["end"])
        assert len(checkpoint["loops"][OUR_KEY]["processes"]) == 2
    manifest = files.read_manifest(folder)
    assert manifest is not None
    assert manifest.files.keys() == {".metadata", "__0_0.distcp", "state.ckpt"}  # the tensors of one process
    exported = pytest.importorskip("safetensors.torch").load_file(weights)
    assert exported.keys() == saved["end"]["weights"].keys()
    assert all(torch.equal(value, saved["end"]["weights"][key]) for key, value in exported.items())
