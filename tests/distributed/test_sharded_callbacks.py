"""Callbacks and diagnosis on a sharded engine (FSDP2) report and do the same as under DDP.

Both have the same numbers: with two ranks a sum has one order, so that weights are bitwise equal, except after a
division by a norm.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch.utils.data import DataLoader

from tests.distributed import sharded_callbacks_worker as worker
from tests.distributed.test_ddp import run
from tests.distributed.worker import BATCH, Shard, samples
from tests.support import needs_fsdp2
from tests.warm_python import WarmPython
from trainer import Trainer
from trainer.callbacks import GradientCheck
from trainer.errors import UnsupportedError

pytestmark = [
    needs_fsdp2,
]

DIAGNOSED = tuple(worker.diagnosis(Path()))
OTHERS = tuple(worker.others(Path()))
CHECKPOINTED = ("checkpointed blocks", "checkpointed by class", "checkpointed around blocks", "checkpointed inside")
ROUNDED = ("measured", "stock")
"""Scenarios with a division by a norm, or by the sizes of windows."""
AVERAGED = ("EMA", "EMA, skipped", "averages", "averages by foreach", "averages, buffers as they are", "SWA")


@pytest.fixture(scope="module")
def folder(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(python, tmp_path_factory.mktemp("sharded"), "torchrun", script=Path(worker.__file__))[1]


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", [*DIAGNOSED, *OTHERS])
def test_all_is_as_under_ddp(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    for rank in ranks:
        ddp, fsdp = rank[name]["ddp"], rank[name]["fsdp"]
        assert fsdp.keys() == ddp.keys()
        for key, expected in ddp.items():
            found = fsdp[key]
            if key in ("weights", "buffers", "saved"):
                assert found.keys() == expected.keys()
                for part, value in expected.items():
                    torch.testing.assert_close(found[part], value, rtol=0, atol=1e-6 if name in ROUNDED else 0)
            elif key in ("metrics", "layer_norms", "whole_norms"):
                assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
            elif key in ("random", "outputs"):
                assert torch.equal(found, expected)
            elif key != "held":
                assert comparable(found, folder) == comparable(expected, folder)


_FROM_FLOAT32 = r"\| (loss|loss scale|incoming gradient|gradients not finite) \| [^|]* \|"


def comparable(found: Any, folder: Path) -> str:
    """Return a text without paths, and without the parts of a report from a replay in float32, which FSDP lacks."""
    text = str(found).replace(str(folder / "fsdp"), str(folder / "ddp"))
    return re.sub(_FROM_FLOAT32, "", text.replace("Not finite in float32 either", "Not finite"))


@pytest.mark.parametrize("name", ["guard skips a loss", "guard skips a gradient"])
def test_guard_skips_on_all(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["fsdp"]["outcomes"] == [False, False, True, False, False] * 2
        assert all(one.isfinite().all() for one in rank[name]["fsdp"]["weights"].values())


def test_guard_names_rank_and_layer_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        message = rank["guard stops at a loss"]["fsdp"]["error"]
        assert "(step 2, batch 2 of rank 1)" in message
        assert "mul in the forward pass, Net.training_step" in message
        message = rank["guard stops at a gradient"]["fsdp"]["error"]
        assert "sqrt in the backward pass, 'net.2' (Overflow)" in message
        message = rank["guard, no loss on the other rank"]["fsdp"]["error"]
        assert "(step 1, batch 3 of rank 1)" in message
        assert "'net.2' (Overflow)" in message


def test_weights_with_a_nan_on_one_rank_are_not_saved(ranks: list[dict[str, Any]], folder: Path) -> None:
    for rank in ranks:
        assert "they were not saved" in rank["weights that are not finite"]["fsdp"]["error"]
        assert "as they were: net.0.weight." in rank["weights that are not finite"]["fsdp"]["error"]
    assert not (folder / "never.ckpt").exists()


def test_underflow_is_that_of_whole_gradients(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        counted = rank["monitor"]["ddp"]["counted"]
        assert counted["net.0.weight"][:2] >= (96, 16)
        counted[""] = tuple(sum(column) for column in zip(*counted.values(), strict=True))
        assert {name: shares for name, *shares in rank["monitor"]["fsdp"]["underflow"]} == {
            name: [zeros / size, subnormal / (size - zeros)] for name, (size, zeros, subnormal) in counted.items()
        }
        size, zeros, subnormal = counted[""]
        assert 16 <= zeros < size
        assert 0 < subnormal < size - zeros
        assert {"grad_norm", "amp/underflow", "amp/scale"} <= rank["monitor"]["fsdp"]["metrics"].keys()


def test_norms_of_layers_are_those_of_whole_gradients(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind in ("ddp", "fsdp"):
            parts: dict[str, list[float]] = {}
            for name, norm in rank["monitor"][kind]["whole_norms"].items():
                parts.setdefault(name.rpartition(".")[0], []).append(norm)
            expected = {layer: math.hypot(*norms) for layer, norms in parts.items()}
            assert len(expected) >= 4
            assert min(expected.values()) > 0
            assert rank["monitor"][kind]["layer_norms"] == pytest.approx(expected, rel=1e-6)
    assert ranks[0]["monitor"]["fsdp"]["layer_norms"] == ranks[1]["monitor"]["fsdp"]["layer_norms"]


@pytest.mark.parametrize(
    ("name", "without"),
    [("report, none on rank 0", "no report, none on rank 0"), ("report on demand", "no report")],
)
def test_replays_leave_no_trace(ranks: list[dict[str, Any]], name: str, without: str) -> None:
    for rank in ranks:
        one, other = rank[name]["fsdp"], rank[without]["fsdp"]
        assert len(one["reports"]) == 1
        for key in ("weights", "buffers"):
            assert all(torch.equal(value, other[key][part]) for part, value in one[key].items())
        assert torch.equal(one["random"], other["random"])


def test_reports_name_the_layer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in ("report", "report, none on rank 0"):
            (report,) = rank[name]["fsdp"]["reports"]
            assert "# Verdict: forward pass overflows in 16 bits" in report
            assert "mul in 'net.2' (Overflow)" in report
            assert "rank 1 |" in report
        report, *_ = rank["report of the backward"]["fsdp"]["reports"]
        assert "'net.2' (Overflow)" in report
        assert "net.2.weight" in report
        assert "# Verdict: none: nothing overflowed" in rank["report on demand"]["fsdp"]["reports"][0]


def test_collapse_stops_all(ranks: list[dict[str, Any]], folder: Path) -> None:
    for rank in ranks:
        assert rank["collapse"]["fsdp"]["error"].startswith("4 optimizer steps in a row were skipped")
    saved = torch.load(folder / "fsdp" / "checkpoints" / "before_collapse.ckpt", weights_only=True)
    assert saved["state_dict"]["net.0.weight"].shape == (16, 6)


def test_fp32_modules_compute_in_float32(ranks: list[dict[str, Any]]) -> None:
    half, single = "torch.float16", "torch.float32"
    for rank in ranks:
        assert rank["fp32_modules"]["fsdp"]["dtypes"] == {"0": half, "1.linear": single, "3.linear": half, "4": single}


def test_fp32_modules_keep_their_weights_in_float32(ranks: list[dict[str, Any]]) -> None:
    half, single = "torch.bfloat16", "torch.float32"
    for rank in ranks:
        for name in ("fp32_modules of 16-bit weights", "fp32_modules below a policy"):
            assert rank[name]["fsdp"]["computed"] == {"0": half, "1.linear": single, "3.linear": half, "4": single}


def test_sizes_are_those_of_whole_layers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "net.0 (Linear): in_features 6 -> 8\n" in rank["alignment"]["fsdp"]["said"]


def test_anomalies_name_the_operation(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["anomaly"]["fsdp"]["error"] == "Function 'SqrtBackward0'" for rank in ranks)


@pytest.mark.parametrize("name", [*CHECKPOINTED, "compiled", "compiled blocks"])
def test_recomputed_and_compiled_blocks_learn_the_same(ranks: list[dict[str, Any]], name: str) -> None:
    compiled = name.startswith("compiled")
    plain = "alignment" if compiled else "nothing"  # of one epoch
    for rank in ranks:
        one, other = rank[name]["fsdp"], rank[plain]["fsdp"]
        for key in ("weights", "buffers"):
            for part, value in one[key].items():
                torch.testing.assert_close(value, other[key][part], rtol=0, atol=1e-6 if compiled else 0)


def test_rates_are_measured_over_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["measured"]["fsdp"]["measured"], rank["measured"]["fsdp"]["rates"]) == (4, 1)
    told = ranks[0]["measured"]["fsdp"]["told"]
    assert (told["status"], told["samples"], told["samples_per_step"]) == ("completed", 40, 8)


@pytest.mark.parametrize("name", AVERAGED)
def test_averages_are_parts_and_validations_see_them(ranks: list[dict[str, Any]], name: str) -> None:
    prefix = "" if name == "SWA" else "module."
    for rank in ranks:
        found = rank[name]["fsdp"]
        assert found["held"] == {f"{prefix}net.1.linear.weight": 128, f"{prefix}net.1.linear.bias": 8}
        # the parameter of the root in the sanity check and in both batches of each validation
        assert found["gains"][0] == 1.0
        assert found["gains"][1] == found["gains"][2] != found["gains"][3] == found["gains"][4]
        assert len(found["gains"]) == (7 if name == "SWA" else 5)


def test_average_that_has_not_begun_is_the_current_weights(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind in worker.KINDS:
            found = rank["EMA, not begun"][kind]
            assert (found["at end"], found["in file"]) == (True, True)
            assert found["gains"][-1] == found["gain"] != found["gains"][0]


@pytest.mark.parametrize("name", ["EMA resumed", "SWA resumed"])
def test_averages_continue_after_a_resume(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(rank[name]["fsdp"]["resumed is the same"] for rank in ranks)
    assert ranks[0][name]["fsdp"]["saved"]["net.0.weight"].shape == (16, 6)


def test_stock_callbacks_see_whole_weights_and_end_a_fit(ranks: list[dict[str, Any]], folder: Path) -> None:
    for rank in ranks:
        found = rank["stock"]["fsdp"]
        assert len(found["outcomes"]) == 5 + 3 + 3  # windows of 1 batch, then of 2; stopped after three epochs
        assert found["saved"]["net.0.weight"].shape == (16, 6)
        assert found["at end"] == [11]
    log = (folder / "fsdp" / "stock" / "version_0" / "metrics.csv").read_text()
    assert "lr-AdamW" in log
    assert "train/samples" in log


def test_same_learning_rate_is_found(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["learning rate found"][kind]["found"] for rank in ranks for kind in worker.KINDS} - {1e-3}) == 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*have no `val_dataloader`")
def test_parameters_unfrozen_later_equal_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    seen = worker.Seen()
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=3, limit_train_batches=5, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0,
        callbacks=[seen, worker.finetuning()],
    )  # fmt: skip
    trainer.fit(worker.Backbone(), DataLoader(samples(), batch_size=BATCH, sampler=Shard(1)))
    for rank in ranks:
        for name, value in seen.state["weights"].items():
            torch.testing.assert_close(rank["finetuned"]["fsdp"]["weights"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("callback", [GradientCheck(), ModelPruning("l1_unstructured")])
def test_callbacks_that_need_whole_weights_are_refused(callback: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(callback).__name__} with strategy='fsdp'"):
        Trainer(accelerator="cpu", devices=2, strategy="fsdp", callbacks=[callback], logger=False)
