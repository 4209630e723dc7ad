"""Lightning's model registry: ``Trainer(model_registry=...)`` and ``ckpt_path="registry:..."``.

Both require the package ``litmodels``. Without it, as in Lightning, the first has no effect, and the second is taken as
a file name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache


def model_name(given: str | None) -> str | None:
    """Return the name of the registered model, without its version."""
    return given.split(":")[0] if given else None


def default_checkpoint(model_registry: str | None) -> Callable[[], Checkpoint]:
    """Return a function that creates the default checkpoint callback; with a registry, one that uploads."""
    if not model_registry or not RequirementCache("litmodels >=0.1.7"):
        return ModelCheckpoint
    from litmodels.integrations.checkpoints import LightningModelCheckpoint  # type: ignore[import-not-found]

    return partial(LightningModelCheckpoint, model_registry=model_registry)
