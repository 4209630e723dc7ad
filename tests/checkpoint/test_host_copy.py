import io
from collections import OrderedDict

import torch
from torch import nn

from trainer.checkpoint.host_copy import on_host


def written(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def state():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].bias = net[1].bias  # one tensor, two names
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    whole = torch.arange(12.0).reshape(3, 4)
    shared = ["a", "list"]
    return {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": (whole[1], whole.t(), whole[:, ::2]),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "others": [torch.ones(2, dtype=torch.bfloat16), torch.tensor(3), torch.empty(0), None, 1.5, "text", b"bytes"],
        "twice": [shared, shared, {"inside": shared}],
        "sparse": torch.eye(3).to_sparse(),
        "ordered": OrderedDict(b=1, a={2, 3}),
    }


def test_copy_is_written_with_the_same_bytes_and_shares_nothing():
    given = state()
    before = written(given)
    copy = on_host(given)
    assert written(copy) == before
    given["state_dict"]["0.weight"].zero_()
    given["optimizer_states"][0]["param_groups"][0]["lr"] = 7.0
    given["views"][0].zero_()
    given["twice"][0].append("more")
    given["parameter"].data.zero_()
    given["sparse"].values().zero_()
    given["ordered"]["a"].add(4)
    assert written(copy) == before


def test_shared_memory_stays_shared():
    copy = on_host(state())
    copy["views"][0][0] = 100.0
    assert copy["views"][1][0, 1] == 100.0
    assert copy["twice"][0] is copy["twice"][1] is copy["twice"][2]["inside"]
    assert copy["state_dict"]._metadata == state()["state_dict"]._metadata
    assert type(copy["parameter"]) is nn.Parameter


def test_conjugated_and_negated_tensors_are_resolved():
    given = torch.tensor([1 + 2j])
    copy = on_host([given.conj(), given.conj().imag])
    assert (copy[0].item(), copy[1].item()) == (1 - 2j, -2)
