"""Two ranks on the CPU, started by each launcher, compared with each other and with one process.

The ranks are started once for all tests; results are read from a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import worker
from tests.warm_python import WarmPython

TIMEOUT = 150  # seconds; a hang is a failure, not a wait
TOLERANCES = {"32-true": 1e-6, "16-mixed": 1e-3, "bf16-mixed": 1e-2}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def run(
    python: WarmPython,
    folder: Path,
    launcher: str,
    *,
    fails: bool = False,
    script: Path = Path(worker.__file__),
    children: bool = False,
    processes: int = 2,
) -> tuple[str, Path]:
    """Run a worker. Returns its output and the folder of its files."""
    arguments = [str(script), str(folder), launcher]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*(torchrun if launcher == "torchrun" else []), *arguments]
    inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment = {**inherited, "OMP_NUM_THREADS": "1"}
    with python.start(
        *command, children=children, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the other rank too
            raise
    assert (process.returncode != 0) is fails, output[-4000:]
    return output, folder


def load(folder: Path, processes: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def launched(python: WarmPython, alone: tuple[Path, dict[str, Any]]) -> tuple[str, Path]:
    return run(python, alone[0], "own")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("own")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        return folder, worker.one_epoch_alone(folder)


@pytest.fixture(scope="module")
def ranks(launched: tuple[str, Path]) -> list[dict[str, Any]]:
    return load(launched[1])


def assert_close(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    for name, value in one["weights"].items():
        torch.testing.assert_close(
            value, other["weights"][name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
        )


FITS = [
    *(f"{kind} {precision}" for kind in ("automatic", "manual") for precision in TOLERANCES),
    "fp32_modules", "bf16-true", "plain", "overflow", "weighted 32-true", "weighted 16-mixed", "checkpoint", "resumed",
    "thawed", "thawed, resumed", *worker.none_everywhere(),
]  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_both_ranks_end_with_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    one, other = (rank[name] for rank in ranks)
    for key, value in one["weights"].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, other["weights"][key]), key
    assert one["global_step"] == other["global_step"] > 0


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_parameters_unfrozen_later_are_averaged(ranks: list[dict[str, Any]]) -> None:
    alone = worker.fit(worker.Regression(), world_size=1, callbacks=[worker.Thaws()], limit_val_batches=0)
    assert_close(alone, ranks[0]["thawed"], 1e-6)
    start = worker.Regression().state_dict()
    assert not torch.equal(start["net.0.weight"], alone["weights"]["net.0.weight"])
    for name, weight in ranks[0]["thawed"]["weights"].items():
        assert torch.equal(ranks[0]["thawed, resumed"]["weights"][name], weight), name


@pytest.mark.parametrize("precision", TOLERANCES)
def test_two_ranks_equal_one_process_on_the_same_batches(ranks: list[dict[str, Any]], precision: str) -> None:
    alone = worker.fit(
        worker.Regression(), world_size=1, precision=worker.precision_of(precision),
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    together = ranks[0][f"automatic {precision}"]
    assert_close(alone, together, TOLERANCES[precision])
    assert together["global_step"] == alone["global_step"] == 6  # windows of 2, 2 and 1 in each of 2 epochs
    assert together["norms"] == pytest.approx(alone["norms"], abs=20 * TOLERANCES[precision])
    assert max(alone["norms"]) > 0.5  # something was clipped


def test_net_in_float32_trains_as_without_autocast(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, value in rank["plain"]["weights"].items():
            assert torch.equal(value, rank["fp32_modules"]["weights"][name])


def test_weights_in_bfloat16(ranks: list[dict[str, Any]]) -> None:
    alone = worker.fit(worker.Regression(), world_size=1, precision="bf16-true")
    assert_close(alone, ranks[0]["bf16-true"], 2e-2)
    assert {value.dtype for value in ranks[0]["bf16-true"]["weights"].values()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("precision", TOLERANCES)
def test_manual_optimization_on_two_ranks_equals_one_process(ranks: list[dict[str, Any]], precision: str) -> None:
    alone = worker.fit(
        worker.Manual(), world_size=1, precision=worker.precision_of(precision), limit_val_batches=0
    )  # fmt: skip
    together = ranks[0][f"manual {precision}"]
    assert_close(alone, together, TOLERANCES[precision])
    assert together["global_step"] == alone["global_step"] == 20


def test_gradients_are_exchanged_once_a_window(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["automatic 32-true"]["synced"] == [False, True, False, True, True] * 2
    assert ranks[1]["plain"]["synced"] == [True] * 10


def by_hand(none_at: set[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """One epoch of 5 batches in windows of 3, SGD with momentum, and means over the available batches."""
    module = worker.Regression()
    optimizer = module.configure_optimizers()
    features, targets = worker.samples().tensors
    for window in ((0, 1, 2), (3, 4)):
        there = [(rank, batch) for batch in window for rank in range(2) if (rank, batch) not in none_at]
        if not there:
            continue
        optimizer.zero_grad()
        for rank, batch in there:
            part = slice(batch * 8 + rank * 4, batch * 8 + rank * 4 + 4)
            (module.loss((features[part], targets[part])) / len(there)).backward()
        optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("name", worker.none_everywhere())
def test_none_on_one_rank_keeps_the_loss_of_the_others(ranks: list[dict[str, Any]], name: str) -> None:
    found = ranks[0][name]
    assert_close({"weights": by_hand(worker.none_everywhere()[name])}, found, 1e-6)
    assert found["global_step"] == 2  # a window without any loss is counted, as in Lightning


def test_none_with_find_unused_parameters(ranks: list[dict[str, Any]]) -> None:
    """The forward had no tensors in None, so that DDP took all parameters for unused."""
    assert_close({"weights": by_hand({(1, 1), (0, 2)})}, ranks[0]["none, looking for unused"], 1e-6)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_weighted_windows_over_ranks_with_unequal_counts_are_one_big_batch(
    ranks: list[dict[str, Any]], precision: str
) -> None:
    """Up to 4 samples per rank and batch, and an empty one: equal to one batch of the window's samples."""
    module = worker.Weighted()
    optimizer = module.configure_optimizers()
    samples = worker.samples().tensors
    for window in ((0, 1, 2), (3, 4)) * 2:
        chosen = [
            batch * 8 + rank * 4 + i for batch in window for rank in range(2) for i in range(module.count(rank, batch))
        ]
        optimizer.zero_grad()
        module.loss(tuple(tensor[chosen] for tensor in samples)).backward()
        optimizer.step()
    assert_close({"weights": module.state_dict()}, ranks[0][f"weighted {precision}"], TOLERANCES[precision])


def test_overflow_on_one_rank_skips_the_step_on_both(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["overflow"]
        assert found["outcomes"] == [False, False, True, False, False] * 2
        assert found["skipped_steps"] == 2
        assert found["global_step"] == 10
        assert found["scale"] == 256.0  # 1024, halved twice


def test_logged_values_are_reduced_over_the_processes(ranks: list[dict[str, Any]]) -> None:
    metrics = [rank["plain"]["metrics"] for rank in ranks]
    for seen in metrics:
        assert seen["rank_mean"] == 0.75  # 0 with weight 1, 1 with weight 3
        assert seen["rank_sum"] == 2 * 3.0  # of 2 batches on each rank
        assert seen["rank_max"] == 1.0
    assert [seen["own"] for seen in metrics] == [0.0, 1.0]
    for name in ("train_loss_step", "train_loss_epoch", "val_loss"):
        assert metrics[0][name] == metrics[1][name]
    alone = worker.fit(worker.Regression(), world_size=1)["metrics"]
    for name in ("train_loss_step", "train_loss_epoch", "val_loss"):
        assert metrics[0][name] == pytest.approx(alone[name], abs=1e-6)


def test_data_is_divided_by_a_distributed_sampler_by_default(ranks: list[dict[str, Any]]) -> None:
    assert {rank["checkpoint"]["sampler"] for rank in ranks} == {"DistributedSampler"}
    assert {rank["plain"]["sampler"] for rank in ranks} == {"Shard"}


def test_one_checkpoint_is_written_and_all_ranks_know_its_name(
    launched: tuple[str, Path], ranks: list[dict[str, Any]]
) -> None:
    written = list((launched[1] / "checkpoints").iterdir())
    assert len(written) == 1
    assert {rank["checkpoint"]["best"] for rank in ranks} == {str(written[0])}
    checkpoint = torch.load(written[0], weights_only=True)
    assert all(name.startswith("net.") for name in checkpoint["state_dict"])  # not DDP's "module.net."


def test_validate_gives_every_rank_the_same_results(ranks: list[dict[str, Any]]) -> None:
    results = [{k: v for k, v in rank["validate"][0].items() if k != "own"} for rank in ranks]
    assert results[0] == results[1]
    assert results[0]["val_loss"] == pytest.approx(ranks[0]["checkpoint"]["metrics"]["val_loss"], rel=0.5)


def test_resumed_run_ends_as_an_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    for name, value in ranks[0]["plain"]["weights"].items():
        assert torch.equal(value, ranks[0]["resumed"]["weights"][name])
    assert ranks[0]["resumed"]["global_step"] == 10


@pytest.mark.parametrize("batch_idx", [1, 2, 4])
def test_run_resumed_inside_an_epoch_equals_the_uninterrupted_run(ranks: list[dict[str, Any]], batch_idx: int) -> None:
    for rank in ranks:
        whole, resumed = rank["whole"], rank[f"resumed after {batch_idx}"]
        assert {"net.1.running_mean", "net.3.weight"} <= whole["weights"].keys()
        for name, value in whole["weights"].items():
            assert torch.equal(value, resumed["weights"][name]), name
        assert whole["metrics"] == resumed["metrics"]
    assert not torch.equal(*(rank["whole"]["weights"]["net.1.running_mean"] for rank in ranks))


def test_run_of_one_process_is_resumed_on_two(alone: tuple[Path, dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
    expected = alone[1]
    assert (expected["scale"], expected["tracker"]) == (512.0, 8)  # 1024, halved in the second batch of ten
    for rank in ranks:
        found = rank["from one process"]
        assert (found["scale"], found["tracker"], found["global_step"]) == (512.0, 8, 10)
        assert_close(expected, found, TOLERANCES["16-mixed"])


def test_no_warnings_of_this_package(launched: tuple[str, Path]) -> None:
    for line in launched[0].splitlines():
        if "Warning" in line:
            meant = ("val_dataloader", "DistributedSampler", "find_unused_parameters=True", "step` returned `None`")
            assert any(text in line for text in meant), line


def test_torchrun_equals_the_built_in_launcher(python: WarmPython, tmp_path: Path, ranks: list[dict[str, Any]]) -> None:
    _, folder = run(python, tmp_path, "torchrun")
    for own, found in zip(ranks, load(folder), strict=True):
        mine = found["automatic 32-true"]
        assert (mine["rank"], mine["world_size"]) == (own["plain"]["rank"], 2)
        for name, value in mine["weights"].items():
            assert torch.equal(value, own["automatic 32-true"]["weights"][name])


def test_rank_that_fails_ends_the_other(python: WarmPython, tmp_path: Path) -> None:
    output, folder = run(python, tmp_path, "fails", fails=True)
    assert "rank 1 has had enough" in output
    assert not list(folder.glob("rank_*.pt"))
