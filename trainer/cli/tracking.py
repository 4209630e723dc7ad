"""W&B and MLflow on the command line: what they need, and what their settings are where a config leaves them open.

The loggers are Lightning's. Imports neither torch nor these packages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer import packages, redaction
from trainer.cli.arguments import UsageError
from trainer.cli.processes import is_first
from trainer.terminal import is_quiet

_STORE = Path("outputs", "mlflow.db")
"""MLflow's, of all runs in this folder, where nobody names another: one database is what its pages show at a time."""
_ARTIFACTS = Path("outputs", "mlflow")

_KINDS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
"""By the class, the package that it needs, which is also the name of the extra that installs it."""
_DATABASE = re.compile(r"(?:sqlite|postgresql|mysql)\b")
_NOT_LOGGED = (
    "allowed_packages", "checkpoint_files", "checks", "compare", "exact_resume", "logger", "objective", "resume",
    "tune",
)  # fmt: skip
"""What of a config says nothing of what was trained, and how."""


def kind_of(node: Any) -> str | None:
    """``wandb`` or ``mlflow``, where a node of the group ``logger`` is Lightning's logger for one; else None."""
    target = str(node.get("_target_", "")) if isinstance(node, Mapping) else ""
    return _KINDS.get(target.rpartition(".")[2]) if target.startswith("lightning.") else None


def check(config: Mapping[str, Any]) -> None:
    """Refuse loggers whose package is not installed, and artifacts that cannot be.

    Raises:
        UsageError: with what to install, or to set.
    """
    for name, node in _nodes(config["logger"]):
        kind = kind_of(node)
        if kind is None:
            continue
        in_database = kind == "mlflow" and _DATABASE.match(_store_of(node))
        modules = (kind, *(("sqlalchemy", "alembic") if in_database else ()))
        if problem := packages.missing(kind, *modules):
            raise UsageError(f"logger.{name} needs {problem}. Without it, use logger=default.")
        _check_artifacts(f"logger.{name}", node, config["checkpoint_files"])


def _check_artifacts(key: str, node: Mapping[str, Any], files: Any) -> None:
    asked = node.get("log_model")
    if not asked or not isinstance(files, Mapping):
        return
    if files.get("sharded") is True:
        raise UsageError(
            f"{key}.log_model is {asked}, and checkpoint_files.sharded is true: checkpoints are folders then, and"
            " artifacts are files. Leave out one of them."
        )
    if files.get("asynchronous") is True and asked == "all":
        raise UsageError(
            f"{key}.log_model is all, and checkpoint_files.asynchronous is true: a checkpoint would be sent before it"
            f" is written. Write {key}.log_model=true, which sends the last ones at the end."
        )


def complete(
    loggers: Mapping[str, Any] | None, folder: Path, name: str | None, *, is_job: bool, former: Mapping[str, Any]
) -> dict[str, Any]:
    """The group ``logger`` with what it leaves open (null) filled in. What the packages' own variables say, they keep.

    Args:
        loggers: the group, resolved.
        folder: of the run.
        name: of what the run belongs to: its ``name`` or its recipe.
        is_job: whether the run is a job of a sweep, whose folder is the one above.
        former: of the run whose checkpoint is tested or the like, the ids that its loggers had, by kind.
    """
    completed = {}
    for key, node in _nodes(loggers):
        kind = kind_of(node)
        sweep = folder.parent.name if is_job else None
        if kind == "wandb":
            node = _wandb(node, folder, name, sweep, former.get("wandb"))
        elif kind == "mlflow":
            node = _mlflow(node, folder, name, sweep, former.get("mlflow"))
        completed[key] = node
    return completed


def _wandb(
    node: Mapping[str, Any], folder: Path, name: str | None, sweep: str | None, former: str | None
) -> dict[str, Any]:
    if is_quiet():
        os.environ.setdefault("WANDB_SILENT", "true")
    said = os.environ.keys()
    return _filled(
        node,
        log_model=False,
        project=None if "WANDB_PROJECT" in said else name,
        name=None if "WANDB_NAME" in said else f"{sweep}/{folder.name}" if sweep else folder.name,
        group=None if "WANDB_RUN_GROUP" in said else sweep,
        id=former,
    )


def _mlflow(
    node: Mapping[str, Any], folder: Path, name: str | None, sweep: str | None, former: str | None
) -> dict[str, Any]:
    store = _store_of(node)
    return _filled(
        node,
        log_model=False,
        tracking_uri=store,
        artifact_location=_ARTIFACTS.absolute().as_uri() if store == _ours() else None,
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME") or name or "unnamed",
        run_name=f"{sweep}/{folder.name}" if sweep else folder.name,
        tags={"sweep": sweep} if sweep else None,
        run_id=former,
    )


def open_stores(loggers: Mapping[str, Any]) -> None:
    """Make the database and the experiment in MLflow. Jobs that are begun side by side would both make them.

    Args:
        loggers: the group, complete. A ``run_id`` that is not in the store is taken out: it was in another one.
    """
    for node in loggers.values() if is_first() else ():
        if kind_of(node) != "mlflow":
            continue
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _alone(node["tracking_uri"]):
            client = MlflowClient(node["tracking_uri"])
            with suppress(MlflowException):  # there is one
                client.create_experiment(node["experiment_name"], artifact_location=node.get("artifact_location"))
        if node.get("run_id") is not None:
            try:
                client.get_run(node["run_id"])
            except MlflowException:
                node["run_id"] = None


@contextmanager
def _alone(store: str) -> Iterator[None]:
    """No other job makes our database meanwhile: MLflow's of two at once would leave it broken."""
    if store != _ours():
        yield
        return
    from filelock import FileLock

    _STORE.parent.mkdir(exist_ok=True)
    with FileLock(_STORE.with_name(".mlflow.lock")):
        yield


def _ours() -> str:
    return f"sqlite:///{_STORE.absolute().as_posix()}"


def _store_of(node: Mapping[str, Any]) -> str:
    if node.get("tracking_uri") is None and node.get("save_dir") is not None:
        return f"file:{node['save_dir']}"  # as the logger has it
    return str(node.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or _ours())


def _filled(node: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return {**node, **{name: value for name, value in values.items() if value is not None and node.get(name) is None}}


def _nodes(loggers: Any) -> list[tuple[str, Any]]:
    return list(loggers.items()) if isinstance(loggers, Mapping) else []


def is_asked_for(loggers: Mapping[str, Any] | None) -> bool:
    """Whether one of the loggers is for W&B or MLflow."""
    return any(kind_of(node) for _, node in _nodes(loggers))


def settings_to_log(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B and MLflow show as the settings of a run, to compare runs by: without secrets and what is null.

    Args:
        settings: the resolved config.
    """
    shared = [settings.get(name) for name in ("optimizer", "scheduler") if settings.get(name) is not None]
    kept = {name: value for name, value in settings.items() if name not in _NOT_LOGGED}
    if isinstance(model := kept.get("model"), Mapping):  # which says the settings of its optimizer once more
        kept["model"] = {name: value for name, value in model.items() if value not in shared}
    return {name: redaction.setting(name, redaction.containers(value)) for name, value in _without_nulls(kept).items()}


def _without_nulls(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in node.items()
        if value is not None and value != {}
    }


def end(*, well: bool) -> None:
    """End a W&B run that is open, and the process that sends it: its state says how the run has ended."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish(exit_code=0 if well else 1)
