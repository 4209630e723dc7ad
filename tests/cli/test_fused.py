"""On CUDA, optimizers of a config use a fused step by default."""

from functools import partial

import pytest
import torch
from torch import nn

from trainer.cli.config_checks import validate
from trainer.cli.execution import assemble
from trainer.cli.fused import fused_on_cuda
from trainer.cli.parsing import read
from trainer.cli.tune import plain

ADAMW, SGD = partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def fused(optimizer):
    (choice,) = {group["fused"] for group in optimizer.param_groups}
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is bool(choice)
    return choice


@pytest.mark.parametrize("make", [ADAMW, SGD, partial(torch.optim.Adam, lr=0.1)])
def test_on_cuda(cuda, make):
    assert fused(fused_on_cuda(make)(nn.Linear(2, 3).cuda().parameters())) is True
    assert fused(make(nn.Linear(2, 3).cuda().parameters())) is None


def test_parameter_groups_keep_their_options(cuda):
    net = nn.Linear(2, 3).cuda()
    groups = [{"params": net.weight, "weight_decay": 0.5}, {"params": iter([net.bias]), "lr": 0.2}]
    optimizer = fused_on_cuda(ADAMW)(groups)
    assert fused(optimizer) is True
    assert [group["params"] for group in optimizer.param_groups] == [[net.weight], [net.bias]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
    named = fused_on_cuda(ADAMW)(net.named_parameters())
    assert fused(named) is True
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_explicit_options_are_kept(cuda, options):
    net = nn.Linear(2, 3).cuda()
    assert not fused(fused_on_cuda(partial(ADAMW, **options))(net.parameters()))
    assert not fused(fused_on_cuda(ADAMW)(net.parameters(), **options))


def test_parameters_without_a_fused_step(cuda):
    on_cpu, on_cuda = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="cuda"))
    number = nn.Parameter(torch.zeros(2, dtype=torch.complex64, device="cuda"))
    assert fused(fused_on_cuda(ADAMW)([on_cpu, on_cuda])) is None
    assert fused(fused_on_cuda(ADAMW)([on_cuda, number])) is None


def test_on_a_cpu_nothing_changes():
    assert fused(fused_on_cuda(ADAMW)(nn.Linear(2, 3).parameters())) is None


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.LBFGS, nn.Linear])
def test_other_optimizers_are_not_changed(kind):
    make = partial(kind, lr=0.1)
    assert fused_on_cuda(make) is make


@pytest.mark.parametrize(("overrides", "expected"), [([], True), (["+optimizer.fused=false"], False)])
def test_run_of_the_command_line(cuda, tmp_path, monkeypatch, overrides, expected):
    monkeypatch.chdir(tmp_path)
    command = ["fit", "+recipe=tabular", "trainer=gpu", "precision=16-mixed", "callbacks=none"]
    settings = plain(validate(read([*command, *overrides])), tmp_path)
    settings["trainer"]["max_steps"] = 2  # `plain` is for long ones
    module, data, trainer = assemble(settings, tmp_path)
    trainer.fit(module, data)
    assert fused(trainer.optimizers[0]) is expected
