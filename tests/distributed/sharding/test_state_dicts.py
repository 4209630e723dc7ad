"""State dicts of sharded tensors; see also ``tests/distributed/test_checkpoints.py``."""

from collections import OrderedDict, defaultdict

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.distributed.sharding.state_dicts import gathered
from trainer.precision.scaler import LossScaler, snapshot_loss
from trainer.state.containers import mapped


def test_gathered_state_dict_has_module_versions(tmp_path):
    """Modules such as BatchNorm detect old versions by the ``_metadata`` of a state dict."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        versions = module.state_dict()._metadata
        weight = module[0].weight.detach().clone()
        module[0].weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
        whole = gathered(module.state_dict(), keep=True)
    finally:
        distributed.destroy_process_group()
    assert not any(isinstance(value, DTensor) for value in whole.values())
    assert torch.equal(whole["0.weight"], weight)
    assert whole._metadata == versions
    assert versions["1"] == {"version": 2}


def test_recorded_loss_is_no_dtensor(tmp_path):
    """A list of recorded losses is read with ``tolist``, which a ``DTensor`` does not support."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh, scaler = init_device_mesh("cpu", (1,)), LossScaler("cpu", init_scale=4.0)
        for placement in (Replicate(), Partial()):
            loss = DTensor.from_local(torch.tensor(3.0, requires_grad=True), mesh, [placement])
            scaler.scale(loss)
            assert snapshot_loss(loss).tolist() == 3.0
    finally:
        distributed.destroy_process_group()
    assert torch.stack(scaler.losses).tolist() == [12.0, 12.0]


def test_only_sharded_parts_are_copied_with_their_places():
    kept, ones = {"a": (1, [torch.zeros(1)])}, torch.ones(1)
    value = OrderedDict(kept=kept, more=[ones, {"b": ones}], counts=defaultdict(int, {2: ones}))
    places = []

    def change(place, tensor):
        places.append(place)
        return tensor * 2 if tensor is ones else tensor

    made = mapped(value, change)
    assert places == [("kept", "a", "1", "0"), ("more", "0"), ("more", "1", "b"), ("counts", "2")]
    assert made["kept"] is kept
    assert (type(made), type(made["counts"]), list(made)) == (OrderedDict, defaultdict, list(value))
    assert [made["more"][0], made["more"][1]["b"], made["counts"][2]] == [torch.tensor([2.0])] * 3
    assert value["more"] == [ones, {"b": ones}]
    assert mapped(value, lambda _, tensor: tensor) is value
