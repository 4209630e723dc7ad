"""``fit(weights=...)`` on two ranks, sharded and unsharded, starts with the weights of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.ranks import RankError, Ranks
from tests.distributed.weights_worker import Net
from tests.support import needs_fsdp2
from trainer.checkpoint import conversion

pytestmark = [
    needs_fsdp2,
]


def saved(folder: Path, form: str) -> tuple[Path, dict[str, Any]]:
    """A file or folder of weights, and its contents."""
    module = Net(seed=3)
    module.net[2].running_mean.fill_(0.5)
    state = module.state_dict()
    file = folder / ("a.safetensors" if form == "safetensors" else "a.ckpt")
    if form == "safetensors":
        save_file(state, file)
    elif form == "other names":
        torch.save({f"model.{name}": value for name, value in state.items()}, file)
    else:
        torch.save({"state_dict": state}, file)
    if form == "folder":
        conversion.split(file, folder / "sharded.ckpt")
        file = folder / "sharded.ckpt"
    return file, state


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("form", ["checkpoint", "folder", "safetensors", "other names"])
def test_both_ranks_start_with_the_weights_of_the_file(ranks: Ranks, tmp_path: Path, form: str, strategy: str) -> None:
    file, state = saved(tmp_path, form)
    for late in (False, True):
        found = ranks.call("tests.distributed.weights_worker:fit", str(file), strategy, late)
        for rank in found:
            assert rank["begun"].keys() == state.keys()
            assert all(torch.equal(value, state[name]) for name, value in rank["begun"].items()), late
            assert rank["facts"]["parameters"] == [6 * 16 + 16 + 32 + 16 * 2 + 2] * 2
            assert not torch.equal(rank["end"]["net.0.weight"], state["net.0.weight"])
        assert found[0]["facts"] == found[1]["facts"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_head_of_another_size_stays(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    file, state = saved(tmp_path, "folder")
    for rank in ranks.call("tests.distributed.weights_worker:fit", str(file), strategy, False, 7):
        assert rank["facts"]["differing"] == {
            "net.3.weight": "(2, 16) in the file and (7, 16) in the module",
            "net.3.bias": "(2,) in the file and (7,) in the module",
        }
        assert torch.equal(rank["begun"]["net.0.weight"], state["net.0.weight"])
        assert rank["begun"]["net.3.weight"].shape == (7, 16)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_average_starts_with_the_weights(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    file, state = saved(tmp_path, "checkpoint")
    for rank in ranks.call("tests.distributed.weights_worker:fit", str(file), strategy, False, 2, True):
        assert all(torch.equal(value, state[name]) for name, value in rank["average"].items())
        assert rank["average"].keys() == state.keys()


def test_weights_of_another_shape_end_both_ranks(ranks: Ranks, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(RankError) as caught:
        ranks.call("tests.distributed.weights_worker:fit", str(tmp_path / "a.pt"), "fsdp")
    assert str(caught.value).count("No weight in") == 2
