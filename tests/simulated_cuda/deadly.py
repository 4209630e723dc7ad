"""Tests that end in all possible ways, for ``test_child.py``."""

import os
import signal

import pytest
import torch


def test_passes(cuda):
    assert torch.ones(1, device="cuda").is_cuda


def test_fails(cuda):
    print("said before")
    assert torch.ones(1, device="cuda").item() == 2


def test_skips(cuda):
    pytest.skip("not today")


def test_dies(cuda):
    os.kill(os.getpid(), signal.SIGSEGV)
