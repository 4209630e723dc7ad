"""The adapter of Lightning's MLflow logger."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from trainer.errors import warn
from trainer.loggers import LoggedRun, TrackerAdapter, fill

_STORE = Path("outputs", "mlflow.db")
"""The default database, for all runs in a working directory: MLflow's pages show one database at a time."""
_ARTIFACTS = Path("outputs", "mlflow")
_DATABASE = re.compile(r"(?:sqlite|postgresql|mysql)\b")


class MLFlow(TrackerAdapter):
    """Lightning's ``MLFlowLogger``."""

    target: ClassVar[str] = "lightning.pytorch.loggers.MLFlowLogger"
    extra: ClassVar[str] = "mlflow"

    @classmethod
    def needed_modules(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return MLflow, and the packages that its database needs."""
        return ("mlflow", "sqlalchemy", "alembic") if _DATABASE.match(_store_of(node)) else ("mlflow",)

    @classmethod
    def complete(cls, node: Mapping[str, Any], run: LoggedRun) -> dict[str, Any]:
        """Return the settings with store, experiment, name and tags."""
        store = _store_of(node)
        return fill(
            node,
            log_model=False,
            tracking_uri=store,
            artifact_location=_ARTIFACTS.absolute().as_uri() if store == _own_store() else None,
            experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name or "unnamed",
            run_name=run.title,
            tags={"sweep": run.sweep} if run.sweep else None,
            run_id=run.former,
        )

    @classmethod
    def prepare(cls, node: dict[str, Any]) -> None:
        """Create the database and the experiment before the run, because parallel jobs would each create them.

        A ``run_id`` that is not in the store is removed, because it belongs to another store.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _locked(node["tracking_uri"]):
            client = MlflowClient(node["tracking_uri"])
            with suppress(MlflowException):  # it exists
                client.create_experiment(node["experiment_name"], artifact_location=node.get("artifact_location"))
        if node.get("run_id") is not None:
            try:
                client.get_run(node["run_id"])
            except MlflowException:
                node["run_id"] = None

    def position(self) -> Any:
        """Return the id of the run."""
        return self.logger._run_id

    def resume(self, step: int | None, position: int | str | None = None) -> None:
        """Continue the run with the id ``position``, unless the user has chosen another one."""
        if not isinstance(position, str) or self.logger._initialized or self.logger._run_id is not None:
            return
        try:
            self.logger._mlflow_client.update_run(position, status="RUNNING")
        except Exception as error:  # it has been deleted, or is elsewhere
            warn(f"MLflow cannot continue the run {position}, so a new one is created: {error}")
        else:
            self.logger._run_id = position

    def log_images(self, name: str, images: Any, step: int) -> None:
        """Log each image with its own name, ``NAME/0`` and so on."""
        for index, image in enumerate(images):
            self.logger.experiment.log_image(self.logger.run_id, image, key=f"{name}/{index}", step=step)

    def log_settings(self, settings: Mapping[str, Any]) -> str | None:
        """Log the settings that the run does not have, and return the id of the run."""
        self.logger.log_hyperparams(self.new_parameters(dict(settings)))
        return str(self.logger.run_id)

    def new_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters, by full name, that the run does not have: MLflow does not change a parameter."""
        from lightning.fabric.utilities.logger import _convert_params, _flatten_dict

        if self.logger.run_id is None:  # on another rank
            return parameters
        known = self.logger.experiment.get_run(self.logger.run_id).data.params
        flat = _flatten_dict(_convert_params(parameters))
        return {name: value for name, value in flat.items() if name not in known}


@contextmanager
def _locked(store: str) -> Iterator[None]:
    """Hold a lock while the default database is created: two jobs at once would leave it broken."""
    if store != _own_store():
        yield
        return
    from filelock import FileLock

    _STORE.parent.mkdir(exist_ok=True)
    with FileLock(_STORE.with_name(".mlflow.lock")):
        yield


def _own_store() -> str:
    return f"sqlite:///{_STORE.absolute().as_posix()}"


def _store_of(node: Mapping[str, Any]) -> str:
    if node.get("tracking_uri") is None and node.get("save_dir") is not None:
        return f"file:{node['save_dir']}"  # as Lightning's logger does
    return str(node.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or _own_store())
