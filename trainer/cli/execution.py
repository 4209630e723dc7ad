"""Run a config: build the objects, execute the command, and write the record."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.arguments import refuse_other_package
from trainer.cli import failure, tracking
from trainer.cli.build import check, make
from trainer.cli.compose import resolve
from trainer.cli.failure import log_warnings
from trainer.cli.folders import merge_recipes
from trainer.cli.objective import choose, monitored, not_logged
from trainer.cli.parsing import UsageError
from trainer.cli.processes import end_with_parent, imports_only, is_first
from trainer.cli.restore import recipe_of
from trainer.cli.targets import Allowlist
from trainer.cli.workdir import resume_command, unresolved_words, words_of_run
from trainer.common import packages, redaction
from trainer.common.files import from_here
from trainer.common.terminal import command_line, is_quiet
from trainer.errors import ConfigurationError, FolderInUseError, TrainerError, memory_at
from trainer.loggers import LoggedRun
from trainer.record.find_checkpoint import checkpoints_in, run_of
from trainer.record.provenance import environment
from trainer.record.run_record import SUCCESSFUL, RunRecord, read_json
from trainer.record.sweep_record import worth_showing

if TYPE_CHECKING:
    from trainer.trainer import Trainer

ADVICE = "lightning.pytorch.advice"
"""Name of the logger of advice, which conf/hydra/job_logging/trainer.yaml prints to the terminal."""

_NODES = ("precision", "callbacks", "logger", "data", "model")
"""Nodes of the config that become objects, in addition to the Trainer."""

_MAX_METRICS = 4
"""Largest number of metrics in the last line of a quiet run."""

log = logging.getLogger(__name__)

is_running = False
"""Whether this process executes a run of the command line."""


def task(config: DictConfig) -> float | None:
    """Run a config, or start the process of a job in a sweep. Hydra calls this function.

    Returns:
        The value of the objective, for the sweeper.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from trainer.cli.sweep.jobs import run_job

        return run_job(config)
    with log_warnings():
        return run(config)


def run(config: DictConfig) -> float | None:
    """Build the objects, execute ``config.command``, and write the record of the run.

    Returns:
        The value of the objective at the end, or None without an objective.

    Raises:
        UsageError: if the config cannot be resolved, or a ``_target_`` cannot be built.
    """
    global is_running
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record = RunRecord.begin(
        folder,
        command=config.command,
        recipe=hydra.runtime.choices.get("recipe") or recipe_of(config.get("ckpt")),
        precision=hydra.runtime.choices.get("precision"),
        seed=config.seed,
        overrides=redaction.containers(unresolved_words(hydra.overrides.task)),
        run_dir=str(folder),
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(redaction.Filter())
    is_job = end_with_parent()
    trainer, settings, is_ours = None, dict[str, Any](), True
    started = time.monotonic()
    outer, is_running = is_running, True
    try:
        settings = resolve(config)
        record.facts["objective"] = _objective(settings, {})
        if is_first():
            _redact_dumps(folder, hydra.output_subdir)
            record.facts["environment"] = environment()
        module, data, trainer = assemble(settings, folder, record)
        started = time.monotonic()  # so that imports and construction are not in the run's time
        with _require_last_checkpoint(settings):
            _execute(settings, record, module, data, trainer)
        _complete(record, trainer, started, "completed")
    except (KeyboardInterrupt, SystemExit) as error:
        _complete(record, trainer, started, "interrupted")
        if not is_job:  # the sweep prints the command for all its jobs
            _print_resume_command(folder, config, trainer)
        if isinstance(error.__context__, BrokenPipeError):  # rich raises SystemExit
            log.error("The output pipe was closed (for example by `| head`); stopping. -q prints less.")
        if isinstance(error.__context__, KeyboardInterrupt):  # the Trainer raises SystemExit
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        is_ours = not isinstance(error, FolderInUseError)  # otherwise another run writes its record there
        _complete(record, trainer, started, "failed", redaction.text(f"{type(error).__name__}: {error}"))
        record.facts |= memory_at(error)
        failure.record(error, folder, config.command, getattr(trainer, "world_size", 1))
        raise
    finally:
        is_running = outer
        record.facts["objective"] = _objective(settings, record.facts)
        is_resumed = config.command == "fit" and getattr(trainer, "ckpt_path", None) is not None
        progress = ("status", "epochs", "steps")
        is_same = all(record.former.get(name) == record.facts.get(name) for name in progress)
        if is_resumed and is_same and record.completed:  # the run has trained no further step
            record.facts = record.former  # they include more, such as the training time
        if is_first() and is_ours:
            record.write()
        tracking.end(ok=record.facts["status"] in SUCCESSFUL)
    metric = (settings.get("objective") or {}).get("metric")
    if record.command == "fit" and record.completed and metric is not None and metric not in record.metrics:
        log.warning(not_logged("objective.metric", metric, "the run did not log", record.metrics))
    if is_first() and not is_quiet() and isinstance(settings["trainer"]["profiler"], str):
        print(f"The profile is in {from_here(folder)}/{config.command}.log.")
    from trainer.callbacks import RunSummary

    shows_summary = config.command == "fit" and any(isinstance(callback, RunSummary) for callback in trainer.callbacks)
    if is_first() and not shows_summary:
        print(_result_line(record), flush=True)
    return record.result


def assemble(settings: dict[str, Any], folder: Path, record: RunRecord | None = None) -> tuple[Any, Any, Any]:
    """Return the LightningModule, the LightningDataModule (or None) and the Trainer that the config describes.

    Args:
        settings: the resolved config, as plain containers.
        folder: folder of the run; the default of the Trainer's ``default_root_dir``.
        record: the record that the Trainer writes, or None to write no record.
    """
    arguments = dict(settings["trainer"])
    target = arguments.pop("_target_")
    allowlist = Allowlist.of(settings)
    logged: dict[str, Any] | None = None  # settings that W&B and MLflow show
    if record is not None and tracking.has_tracker(settings["logger"]):
        settings, logged = _with_tracking(settings, folder, record)
    with imports_only():  # all names are found and checked before any object is built
        import lightning as L
        from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar

        from trainer.callbacks import Curves, LayerNorms, RunRecorder, RunSummary, ScaleMonitor
        from trainer.cli.fused import fusing
        from trainer.trainer import Trainer

        merge_recipes()
        if settings["seed"] is not None:
            L.seed_everything(settings["seed"], workers=True, verbose=False)
        # first check the nodes that the model contains through interpolations, so that an error names the node with the
        # mistake, not the model
        taken = settings["model"].values() if isinstance(settings["model"], dict) else ()
        shared = {name: settings.get(name) for name in ("optimizer", "scheduler")}
        check({name: node for name, node in shared.items() if isinstance(node, dict) and node in taken}, "", allowlist)
        check({name: settings[name] for name in _NODES} | {"trainer": arguments}, "", allowlist)
        trainer_class = allowlist.locate(target, "trainer")

    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()  # Hydra's handlers write to the terminal and the log
        logger.propagate = True  # Lightning sets False if it is imported before logging is configured
    # Fewer batches than `log_every_n_steps` are expected in short runs, and recipes set that interval.
    warnings.filterwarnings("ignore", "The number of training batches", UserWarning)
    # `checks` measures the effect of more workers, and recipes set a suitable number.
    warnings.filterwarnings("ignore", ".*does not have many workers", UserWarning)
    # A run that resumes from a checkpoint of another folder keeps its own best checkpoints on purpose.
    warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
    arguments = make(arguments, "trainer", allowlist)
    _add_checkpoint_files(arguments, settings["checkpoint_files"])
    if arguments.get("resume") is None and arguments.get("exact_resume") is True:
        del arguments["resume"], arguments["exact_resume"]  # because other Trainer classes may not have them
    arguments["default_root_dir"] = arguments["default_root_dir"] or str(folder)
    arguments["precision"] = make(settings["precision"], "precision", allowlist)
    arguments["callbacks"] = _make_all(settings["callbacks"], "callbacks", allowlist)
    if logged is not None:
        tracking.open_stores(settings["logger"])
    arguments["logger"] = _make_all(_available_loggers(settings["logger"]), "logger", allowlist) or False
    unwanted: tuple[type, ...] = ()  # callbacks to remove, of the default config or a recipe
    if arguments["barebones"]:
        unwanted = (Checkpoint, Curves, LayerNorms, LearningRateMonitor, RunSummary, ScaleMonitor)
        arguments["logger"], arguments["log_every_n_steps"] = False, None
    elif arguments["enable_checkpointing"] is False:
        unwanted = (Checkpoint,)
    if is_quiet():
        unwanted = (*unwanted, ModelSummary, ProgressBar, RunSummary)
        arguments["enable_progress_bar"] = arguments["enable_model_summary"] = False
        logging.getLogger(ADVICE).handlers.clear()
    arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, unwanted)]
    if record is not None and not arguments["barebones"]:
        arguments["callbacks"].append(RunRecorder(record, settings=logged))

    data = make(settings["data"], "data", allowlist)
    if settings["weights"] is not None and not issubclass(trainer_class, Trainer):
        raise UsageError(f"Got weights with trainer._target_={target}, expected trainer.Trainer. Remove one of them.")
    module = make(settings["model"], "model", allowlist, fusing(trainer_class))
    _check_class("model", module, L.LightningModule, settings)
    if data is not None:
        _check_class("data", data, L.LightningDataModule, settings)
    try:
        trainer = trainer_class(**arguments)
    except ModuleNotFoundError as error:  # raised by an accelerator or a strategy
        raise UsageError(f"The trainer's settings need a package that is not installed: {error}.") from error
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        if not trainer_class.__module__.startswith(("trainer.", "lightning.")):
            raise
        raise UsageError(f"The trainer's settings contradict each other: {failure.one_line(error)}") from error
    if is_first() and not is_quiet() and (choice := getattr(arguments["precision"], "description", "")):
        print(choice, file=sys.stderr)  # the log has it too, but precision=auto has to print its choice
    return module, data, trainer


def _with_tracking(settings: dict[str, Any], folder: Path, record: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings with the loggers' nodes completed, and the settings that the loggers record."""
    former: Any = {}
    if settings["ckpt"] and settings["command"] != "fit" and (tested := run_of(Path(settings["ckpt"]))):
        former = read_json(tested).get("tracking") or {}  # so that results are added to the run that is tested
    words = unresolved_words(HydraConfig.get().overrides.hydra)
    # not `hydra.job.num` itself, because a run of ckpt=RUN has the number of its job, too
    is_job = any(word.startswith("hydra.job.num=") for word in words)
    run = LoggedRun(folder, settings.get("name") or record.facts["recipe"], folder.parent.name if is_job else None)
    loggers = tracking.complete(settings["logger"], run, former)
    return settings | {"logger": loggers}, {} if former else tracking.settings_to_log(settings)


def _print_resume_command(folder: Path, config: DictConfig, trainer: Trainer | None) -> None:
    """Print the command that resumes an interrupted fit."""
    has_saved = bool(checkpoints_in(folder)) and not getattr(trainer, "fast_dev_run", False)
    if config.command == "fit" and is_first() and has_saved:
        command = resume_command("fit", words_of_run(), from_here(folder), "hydra.run.dir")
        print(f"To resume: {command}", file=sys.stderr, flush=True)


def _add_checkpoint_files(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    """Add `trainer.CheckpointFiles` with ``settings`` to the Trainer's plugins, unless they are the defaults."""
    from trainer import CheckpointFiles

    default = CheckpointFiles()
    if all(getattr(default, name) == value for name, value in settings.items()):
        return
    given = arguments.get("plugins")
    plugins = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    arguments["plugins"] = [*plugins, CheckpointFiles(**settings)]


def _check_class(name: str, built: Any, expected: type, settings: dict[str, Any]) -> None:
    plain = getattr(built, "_orig_mod", built)
    refuse_other_package(name, plain)
    if not isinstance(plain, expected):
        returned = f"which returns a {type(built).__name__}, expected a {expected.__name__}"
        advice = f"Write a {expected.__name__} that uses it, and set {name}._target_ to that."
        raise UsageError(f"{name} is {settings[name]['_target_']}, {returned}. {advice}")


def _redact_dumps(folder: Path, subfolder: str | None) -> None:
    """Redact secrets, such as passwords, in the files that Hydra wrote. Interpolations (``${oc.env:NAME}``) stay."""
    for file in (folder / subfolder).glob("*.yaml") if subfolder else ():
        written = file.read_text(encoding="utf-8")
        if (redacted := redaction.text(written)) != written:
            file.write_text(redacted, encoding="utf-8")


def _available_loggers(loggers: dict[str, Any]) -> dict[str, Any]:
    """Remove the TensorBoard logger if its package is missing and the user did not choose it."""
    name = "tensorboard"
    words = unresolved_words(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    if name not in loggers or any(name in word for word in words) or (problem := packages.missing(name)) is None:
        return loggers
    logging.getLogger(ADVICE).info("No TensorBoard files are written: TensorBoard needs %s", problem)
    return {key: node for key, node in loggers.items() if key != name}


def _make_all(nodes: dict[str, Any] | None, key: str, allowlist: Allowlist) -> list[Any]:
    """Return the objects of a group of named nodes. Nodes without a target are ignored: they were not chosen."""
    chosen = {name: node for name, node in (nodes or {}).items() if node and "_target_" in node}
    return [make(node, f"{key}.{name}", allowlist) for name, node in chosen.items()]


def _execute(settings: dict[str, Any], record: RunRecord, module: Any, data: Any, trainer: Trainer) -> None:
    command, checkpoint = settings["command"], settings["ckpt_path"]
    if command != "fit" and is_first():
        if checkpoint is None:
            log.warning("%s uses newly initialized weights. To use a run's weights and config, add ckpt=RUN.", command)
        with suppress(OSError):  # a missing record does not fail the run
            record.write()
    if command == "predict":
        _predict(Path(record.facts["run_dir"]), module, data, trainer, checkpoint)
        return
    if trainer.resume == "auto" and checkpoints_in(Path(record.facts["run_dir"])):
        checkpoint = None  # resume the run in this folder, even if it originally started from another checkpoint
    options: dict[str, Any] = {"verbose": False} if command in ("validate", "test") and is_quiet() else {}
    if command == "fit" and settings["weights"] is not None:
        options["weights"] = settings["weights"]
    getattr(trainer, command)(module, datamodule=data, ckpt_path=checkpoint, **options)
    if command == "fit" and not record.facts.get("pruned"):
        from trainer.record.measures import reason_without_updates

        if problem := reason_without_updates(trainer):
            raise TrainerError(problem)


@contextmanager
def _require_last_checkpoint(settings: dict[str, Any]) -> Iterator[None]:
    """Raise if ``ckpt_path=last`` finds no checkpoint; Lightning warns and starts from the beginning."""
    if settings["ckpt_path"] == "last":
        warnings.filterwarnings("error", r'\.\w+\(ckpt_path="last"\) is set, but there is no last checkpoint')
    try:
        yield
    except UserWarning as warning:
        if "no last checkpoint" not in str(warning):
            raise
        raise UsageError(
            "ckpt_path is last, and there is no last checkpoint in any folder of this run. To resume a run, or to use"
            f" its weights: `{command_line(settings['command'], 'ckpt=RUN')}`. resume=auto also starts without one."
        ) from warning


def _result_line(run: RunRecord) -> str:
    """Return the line that a run without a summary prints at its end."""
    names = worth_showing(run.metrics)[:_MAX_METRICS] if is_quiet() else []
    metrics = ", ".join(f"{name}={run.metrics[name]:.4g}" for name in names)
    rate = run.samples_per_second
    speed = "" if rate is None or is_quiet() else f", {rate:,.1f} samples/s"
    line = f"{run.command} {run.status} in {run.seconds:.1f} s{speed}" + (f": {metrics}" if metrics else "")
    return f"{line}. Results are in {from_here(run.folder)}"


def _predict(folder: Path, module: Any, data: Any, trainer: Trainer, checkpoint: str | None) -> None:
    """Predict, and write the predictions to ``predictions.pt`` unless a callback writes them."""
    import torch
    from lightning.pytorch.callbacks import BasePredictionWriter

    is_written = any(isinstance(callback, BasePredictionWriter) for callback in trainer.callbacks)
    predictions = trainer.predict(
        module, datamodule=data, ckpt_path=checkpoint, return_predictions=False if is_written else None
    )
    if not is_written:
        name = "predictions.pt" if trainer.world_size == 1 else f"predictions_{trainer.global_rank}.pt"
        torch.save(predictions, folder / name)


def _complete(
    record: RunRecord, trainer: Trainer | None, started: float, status: str, error: str | None = None
) -> None:
    """Add the missing facts to the record: its status, and all facts if no `RunRecorder` has added them."""
    facts = record.facts
    if facts["status"] == "running" and trainer is not None:
        from trainer.record.measures import facts_of

        try:
            facts |= facts_of(trainer)
        except Exception:  # must not hide the error of the run
            log.warning("The record of the run is incomplete.", exc_info=True)
    facts |= {"status": "pruned" if status == "completed" and facts.get("pruned") else status, "error": error}
    if facts["command"] != "fit" or facts["status"] in SUCCESSFUL:  # RunRecorder measures a fit that fails in training
        facts.setdefault("seconds", round(time.monotonic() - started, 3))


def _objective(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return metric, mode (``"min"`` or ``"max"``) and value of the objective, or None without one."""
    chosen = choose(settings.get("objective"), facts.get("monitor") or monitored(settings.get("callbacks")))
    if chosen is None:
        return None
    objective = {"metric": chosen[0], "mode": chosen[1]}
    return objective | {"value": RunRecord({**facts, "objective": objective}, None).objective_value}
