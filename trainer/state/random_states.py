"""The random number generators of a process, as plain data: python's, numpy's, torch's and the device's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of all generators, as it is now.

    Args:
        device: whose generator to take along; None for the host's alone. On a GPU too its state is kept on the host:
            no synchronisation.

    Returns:
        Plain containers and tensors, about 13 KB, which ``torch.load(weights_only=True)`` reads.
    """
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            int(legacy["state"]["pos"]),
            int(legacy["has_gauss"]),
            float(legacy["gauss"]),
        ],
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Make it so again.

    Args:
        state: what :func:`capture` returned; generators that it does not have are left alone.
        device: whose generator to set; None for the host's alone.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    key, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextmanager
def isolated(device: torch.device | None = None) -> Iterator[None]:
    """What is drawn inside does not show outside."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)
