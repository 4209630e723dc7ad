"""Lightning's model registry: ``Trainer(model_registry=...)`` and ``ckpt_path="registry:..."``.

Both need the package ``litmodels``. Without it, as with Lightning, the first has no effect, and the second is a file's
name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache


def model_name(given: str | None) -> str | None:
    """The name of the registered model, without its version."""
    return given.split(":")[0] if given else None


def default_checkpoint(model_registry: str | None) -> Callable[[], Checkpoint]:
    """Makes the default checkpoint callback; one that uploads, if there is a registry."""
    if not model_registry or not RequirementCache("litmodels >=0.1.7"):
        return ModelCheckpoint
    from litmodels.integrations.checkpoints import LightningModelCheckpoint  # type: ignore[import-not-found]

    return partial(LightningModelCheckpoint, model_registry=model_registry)
