"""Arguments of ``FSDP2Strategy``, and errors for unsupported ones."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import needs_fsdp2
from trainer import FSDP2Strategy
from trainer.errors import ConfigurationError, UnsupportedError

pytestmark = needs_fsdp2


def test_defaults():
    settings = FSDP2Strategy().settings
    assert settings.blocks is None
    assert settings.policy == MixedPrecisionPolicy()
    assert settings.sync_each_batch


@pytest.mark.parametrize("blocks", [nn.Linear, [nn.Linear], {nn.Linear}])
def test_blocks_are_classes(blocks):
    assert FSDP2Strategy(blocks=blocks).settings.blocks == (nn.Linear,)
    assert FSDP2Strategy(blocks="Linear").settings.blocks == ("Linear",)


def test_policy_from_a_config():
    given = {"param_dtype": "bfloat16", "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert FSDP2Strategy(mixed_precision=given).settings.policy == expected


def test_time_may_be_seconds():
    assert FSDP2Strategy(timeout=90)._timeout == timedelta(seconds=90)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"blocks": 1}, "blocks=1.*classes of modules"),
        ({"blocks": [int]}, "blocks=.*classes of modules"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no'.*number of processes"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16'.*MixedPrecisionPolicy"),
        ({"mixed_precision": {"param_dtyp": "bfloat16"}}, "Did you mean 'param_dtype'"),
        ({"mixed_precision": {"param_dtype": "bf16"}}, "mixed_precision.param_dtype='bf16'.*bfloat16"),
        ({"mixed_precision": {"cast_forward_inputs": "float32"}}, "expected True or False"),
        ({"cpu_offload": 1}, "cpu_offload=1.*True or False"),
        ({"replicas": 0}, "replicas=0.*at least 1"),
        ({"replicas": True}, "replicas=True"),
        ({"sync_each_batch": None}, "sync_each_batch=None"),
        ({"timeout": -1}, "timeout=-1.*seconds"),
        ({"timeout": float("inf")}, "timeout=inf.*seconds"),
    ],
)
def test_mistakes(given, words):
    with pytest.raises(ConfigurationError, match=words):
        FSDP2Strategy(**given)


def test_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr("trainer.distributed.fsdp.IS_SUPPORTED", False)
    with pytest.raises(UnsupportedError, match=r"expected 2\.13 or newer.*strategy='ddp'"):
        FSDP2Strategy()
