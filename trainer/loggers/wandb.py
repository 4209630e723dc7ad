"""The adapter of Lightning's W&B logger."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.common.terminal import is_quiet
from trainer.loggers import LoggedRun, TrackerAdapter, fill


class Wandb(TrackerAdapter):
    """Lightning's ``WandbLogger``."""

    target: ClassVar[str] = "lightning.pytorch.loggers.WandbLogger"
    opening_order: ClassVar[int] = 0  # W&B records only files (TensorBoard) that are opened after it
    extra: ClassVar[str] = "wandb"

    @classmethod
    def complete(cls, node: Mapping[str, Any], run: LoggedRun) -> dict[str, Any]:
        """Return the settings with project, name and group; W&B's own environment variables take precedence."""
        if is_quiet():
            os.environ.setdefault("WANDB_SILENT", "true")
        values = {"WANDB_PROJECT": run.name, "WANDB_NAME": run.title, "WANDB_RUN_GROUP": run.sweep}
        project, name, group = (None if name in os.environ else value for name, value in values.items())
        return fill(node, log_model=False, project=project, name=name, group=group, id=run.former)

    @classmethod
    def end(cls, *, ok: bool) -> None:
        """End an open run and its upload process, so that its state shows whether the run was successful."""
        wandb = sys.modules.get("wandb")
        if wandb is not None and getattr(wandb, "run", None) is not None:
            wandb.finish(exit_code=0 if ok else 1)

    def position(self) -> Any:
        """Return the id of the run."""
        return self.logger.version

    def resume(self, step: int | None, position: int | str | None = None) -> None:
        """Continue the run with the id ``position``, unless the user has chosen another one."""
        if isinstance(position, str) and self.logger._experiment is None and self.logger._id is None:
            self.logger._id = self.logger._wandb_init["id"] = position

    def log_images(self, name: str, images: Any, step: int) -> None:
        """Log the images as one row."""
        self.logger.log_image(name, list(images), step=step)
