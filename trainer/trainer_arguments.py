"""The Trainer's arguments from the environment, and the messages about devices when a Trainer is created."""

from __future__ import annotations

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.setup import _log_device_info as log_devices
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars as defaults_from_environment

__all__ = ["defaults_from_environment", "log_devices", "registered_names"]


def registered_names() -> dict[str, list[str]]:
    """Return the accelerators and strategies that are registered with Lightning, including those of other packages."""
    return {
        "accelerator": list(AcceleratorRegistry.available_accelerators()),
        "strategy": list(StrategyRegistry.available_strategies()),
    }
