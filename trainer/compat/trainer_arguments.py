"""The Trainer's arguments from the environment, and what it says about the machine when it is built."""

from __future__ import annotations

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.setup import _log_device_info as log_devices
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars as defaults_from_environment

__all__ = ["defaults_from_environment", "log_devices", "registered_names"]


def registered_names() -> dict[str, list[str]]:
    """The accelerators and strategies that Lightning knows, those of other packages among them."""
    return {
        "accelerator": list(AcceleratorRegistry.available_accelerators()),
        "strategy": list(StrategyRegistry.available_strategies()),
    }
