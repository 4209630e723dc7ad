"""One run: from the config to objects, from objects to a result. The only module here that needs torch."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer import packages, redaction
from trainer.cli import failure, tracking
from trainer.cli.arguments import UsageError
from trainer.cli.build import check, make
from trainer.cli.compose import resolve
from trainer.cli.folders import merge_recipes
from trainer.cli.objective import choose, monitored
from trainer.cli.overrides import with_values
from trainer.cli.processes import PARENT, end_with_parent, imports_only, is_first
from trainer.cli.restore import recipe_of, run_of
from trainer.cli.targets import Allowlist
from trainer.cli.warned import noted
from trainer.cli.workdir import config_flags, go_on_command
from trainer.errors import ConfigurationError, FolderInUseError, TrainerError, did_you_mean, memory_at
from trainer.files import from_here
from trainer.loggers import LoggedRun
from trainer.record.provenance import environment
from trainer.record.run_record import ENDED_WELL, RunRecord, read_json
from trainer.record.sweep import worth_showing
from trainer.terminal import is_quiet

ADVICE = "lightning.pytorch.advice"
"""The logger of advice, which conf/hydra/job_logging/trainer.yaml lets through to the terminal."""

_MADE = ("precision", "callbacks", "logger", "data", "model")
"""Nodes of the config that become objects, beside the Trainer's."""

_MOST_METRICS = 4
"""In the last line of a quiet run."""

log = logging.getLogger(__name__)


def task(config: DictConfig) -> float | None:
    """What Hydra calls: the run itself or, in a sweep, the start of one.

    Returns:
        The value of the objective, for the sweeper.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from trainer.cli.sweep.jobs import run_job

        return run_job(config)
    with noted():
        return run(config)


def run(config: DictConfig) -> float | None:
    """Build the objects, do ``config.command``, and write down how it went.

    Returns:
        The value of the objective at the end; None without one.

    Raises:
        UsageError: a config that cannot be resolved, or a ``_target_`` that cannot be built.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record = RunRecord.begin(
        folder,
        command=config.command,
        recipe=hydra.runtime.choices.get("recipe") or recipe_of(config.get("ckpt")),
        precision=hydra.runtime.choices.get("precision"),
        seed=config.seed,
        overrides=redaction.containers(OmegaConf.to_container(hydra.overrides.task, resolve=False)),
        run_dir=str(folder),
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(redaction.Filter())
    end_with_parent()
    trainer, settings, is_ours = None, dict[str, Any](), True
    started = time.monotonic()
    try:
        settings = resolve(config)
        record.facts["objective"] = _goal(settings, {})
        if is_first():
            _redact_dumps(folder, hydra.output_subdir)
            record.facts["environment"] = environment()
        module, data, trainer = assemble(settings, folder, record)
        started = time.monotonic()  # importing and building is not what a run is compared by
        with _last_has_to_exist(settings):
            _execute(settings, record, module, data, trainer)
        _complete(record, trainer, started, "completed")
    except (KeyboardInterrupt, SystemExit) as error:
        _complete(record, trainer, started, "interrupted")
        _say_how_to_go_on(folder, config, trainer)
        if isinstance(error.__context__, BrokenPipeError):  # rich makes an exit of it
            log.error("Nobody reads what the run prints any more, as after `| head`, so it has ended; -q prints less.")
        if isinstance(error.__context__, KeyboardInterrupt):  # what the Trainer makes of a Ctrl-C
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        is_ours = not isinstance(error, FolderInUseError)  # or another run will say how it went
        _complete(record, trainer, started, "failed", redaction.text(f"{type(error).__name__}: {error}"))
        record.facts |= memory_at(error)
        failure.explain_path(error, settings)
        failure.record(error, folder, config.command, getattr(trainer, "world_size", 1))
        raise
    finally:
        record.facts["objective"] = _goal(settings, record.facts)
        if _has_added_nothing(trainer, record):
            record.facts = record.former  # it tells more: how long it took, for example
            log.info("Nothing was left to do: the run in %s is complete.", folder)
        if is_first() and is_ours:
            record.write()
        tracking.end(ok=record.facts["status"] in ENDED_WELL)
    _warn_of_missing_objective(settings, record)
    if is_first() and not is_quiet() and isinstance(settings["trainer"]["profiler"], str):
        print(f"The profile is in {from_here(folder)}/{config.command}.log.")
    if is_first() and not (config.command == "fit" and _shows_summary(trainer)):
        print(_last_line(record), flush=True)
    return record.result


def assemble(settings: dict[str, Any], folder: Path, record: RunRecord | None = None) -> tuple[Any, Any, Any]:
    """The LightningModule, the LightningDataModule (or None) and the Trainer that the config describes.

    Args:
        settings: the resolved config, as plain containers.
        folder: of the run; the Trainer's ``default_root_dir``.
        record: of the run, which the Trainer is to keep; None for none.
    """
    arguments = dict(settings["trainer"])
    target = arguments.pop("_target_")
    allowlist = Allowlist.of(settings)
    logged: dict[str, Any] | None = None  # settings, as W&B and MLflow show them
    if record is not None and tracking.is_asked_for(settings["logger"]):
        settings, logged = _with_tracking(settings, folder, record)
    with imports_only():  # everything is found and checked before anything is made
        import lightning as L
        from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar

        from trainer.callbacks import Curves, LayerNorms, RunRecorder, RunSummary, ScaleMonitor
        from trainer.cli.fused import fusing
        from trainer.trainer import Trainer

        merge_recipes()
        if settings["seed"] is not None:
            L.seed_everything(settings["seed"], workers=True, verbose=False)
        shared = {name: settings[name] for name in ("optimizer", "scheduler") if _is_taken(name, settings)}
        check(shared, "", allowlist)  # first, so that a mistake is named where it can be changed
        check({name: settings[name] for name in _MADE} | {"trainer": arguments}, "", allowlist)
        trainer_class = allowlist.locate(target, "trainer")

    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()  # the terminal and the file that Hydra has set up are enough
        logger.propagate = True  # Lightning sets False where it is imported before anybody has set up logging
    # Whoever limits the batches, or has few, knows that a logger gets less than 50 steps; the recipes set what it gets.
    warnings.filterwarnings("ignore", "The number of training batches", UserWarning)
    # `checks` measures what workers would gain, and the recipes have the number that suits their data.
    warnings.filterwarnings("ignore", ".*does not have many workers", UserWarning)
    # A run that goes on from a checkpoint in a folder of its own keeps its own best checkpoints: meant to be so.
    warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
    arguments = make(arguments, "trainer", allowlist)
    _add_checkpoint_files(arguments, settings["checkpoint_files"])
    if arguments.get("resume") is None and arguments.get("exact_resume") is True:
        del arguments["resume"], arguments["exact_resume"]  # a Trainer of somebody else's need not know them
    arguments["default_root_dir"] = arguments["default_root_dir"] or str(folder)
    arguments["precision"] = make(settings["precision"], "precision", allowlist)
    arguments["callbacks"] = _make_all(settings["callbacks"], "callbacks", allowlist)
    if logged is not None:
        tracking.open_stores(settings["logger"])
    arguments["logger"] = _make_all(_available(settings["logger"]), "logger", allowlist) or False
    unwanted: tuple[type, ...] = ()  # what the default config, or a recipe, has put there
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
        raise UsageError(f"weights is for trainer.Trainer, and trainer._target_ is {target}: leave one of them out.")
    module = make(settings["model"], "model", allowlist, fusing(trainer_class))
    _check_kinds(module, data, settings)
    try:
        trainer = trainer_class(**arguments)
    except ModuleNotFoundError as error:  # of an accelerator, or of a strategy
        raise UsageError(f"The trainer's settings ask for what is not installed: {error}.") from error
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        if not trainer_class.__module__.startswith(("trainer.", "lightning.")):
            raise
        raise UsageError(f"The trainer's settings do not go together: {failure.one_line(error)}") from error
    if is_first() and not is_quiet() and (said := getattr(arguments["precision"], "said", "")):
        print(said, file=sys.stderr)  # in the log as well; but who asked for "auto" wants to see it
    return module, data, trainer


def _with_tracking(settings: dict[str, Any], folder: Path, record: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings with those of the loggers filled in, and the settings that the loggers show."""
    former: Any = {}
    if settings["ckpt"] and settings["command"] != "fit" and (tested := run_of(Path(settings["ckpt"]))):
        former = read_json(tested).get("tracking") or {}  # the results belong to the run that is tested
    is_job = not OmegaConf.is_missing(HydraConfig.get().job, "num")
    run = LoggedRun(folder, settings.get("name") or record.facts["recipe"], folder.parent.name if is_job else None)
    loggers = tracking.complete(settings["logger"], run, former)
    return settings | {"logger": loggers}, {} if former else tracking.settings_to_log(settings)


def _is_taken(name: str, settings: dict[str, Any]) -> bool:
    """Whether the model takes the node ``name`` of the config, by an interpolation."""
    node, model = settings.get(name), settings["model"]
    return isinstance(node, dict) and isinstance(model, dict) and node in model.values()


def _say_how_to_go_on(folder: Path, config: DictConfig, trainer: Any) -> None:
    """After a fit that was interrupted: the command that goes on, unless it is a job, of which its sweep will speak."""
    has_saved = any(folder.rglob("*.ckpt")) and not getattr(trainer, "fast_dev_run", False)
    hydra = HydraConfig.get()
    words = [word for word in with_values(hydra.overrides.task, config) if not word.startswith("command=")]
    if config.command != "fit" or not is_first() or PARENT in os.environ or not has_saved:
        return
    if any(
        word.lstrip("+").startswith(("ckpt=", "ckpt_path=")) for word in words
    ):  # that is where it would begin again
        return
    command = go_on_command("fit", words, from_here(folder), "hydra.run.dir", config_flags(hydra))
    print(f"To go on: {command}", file=sys.stderr, flush=True)


def _add_checkpoint_files(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    """Have the Trainer write checkpoints as ``settings`` say, where they say something else than by default."""
    from trainer import CheckpointFiles

    default = CheckpointFiles()
    if all(getattr(default, name) == value for name, value in settings.items()):
        return
    given = arguments.get("plugins")
    plugins = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    arguments["plugins"] = [*plugins, CheckpointFiles(**settings)]


def _check_kinds(module: Any, data: Any, settings: dict[str, Any]) -> None:
    import lightning as L

    from trainer.arguments import refuse_other_package

    for name, made, kind in (("model", module, L.LightningModule), ("data", data, L.LightningDataModule)):
        refuse_other_package(name, getattr(made, "_orig_mod", made))
        if made is not None and not isinstance(getattr(made, "_orig_mod", made), kind):
            raise UsageError(
                f"{name} is {settings[name]['_target_']}, which makes a {type(made).__name__}, expected a"
                f" {kind.__name__}. Write one that uses it, and name that."
            )


def _redact_dumps(folder: Path, subfolder: str | None) -> None:
    """Take secrets out of what Hydra has written; ``${oc.env:...}`` it leaves as it is, but passwords as well."""
    for file in (folder / subfolder).glob("*.yaml") if subfolder else ():
        written = file.read_text(encoding="utf-8")
        if (redacted := redaction.text(written)) != written:
            file.write_text(redacted, encoding="utf-8")


def _available(loggers: dict[str, Any]) -> dict[str, Any]:
    """Leave TensorBoard out if its package is missing and nobody chose it: it is a default of the config."""
    name = "tensorboard"
    is_chosen = HydraConfig.initialized() and any(name in word for word in HydraConfig.get().overrides.task)
    if name not in loggers or is_chosen or (problem := packages.missing(name)) is None:
        return loggers
    logging.getLogger(ADVICE).info("No files for TensorBoard are written, which needs %s", problem)
    return {key: node for key, node in loggers.items() if key != name}


def _make_all(nodes: dict[str, Any] | None, key: str, allowlist: Allowlist) -> list[Any]:
    """The objects of a group of named nodes; without a target are those a recipe sets but nobody chose."""
    return [
        make(node, f"{key}.{name}", allowlist) for name, node in (nodes or {}).items() if node and "_target_" in node
    ]


def _execute(settings: dict[str, Any], record: RunRecord, module: Any, data: Any, trainer: Any) -> None:
    command, checkpoint = settings["command"], settings["ckpt_path"]
    if command != "fit" and is_first():
        if checkpoint is None:
            log.warning(
                "%s uses fresh weights. For those of a run, and its config: ckpt=RUN, its folder or a checkpoint.",
                command,
            )
        with suppress(OSError):  # no reason to fail a run
            record.write()
    if command == "predict":
        _predict(Path(record.facts["run_dir"]), module, data, trainer, checkpoint)
        return
    more: dict[str, Any] = {"verbose": False} if command in ("validate", "test") and is_quiet() else {}
    if command == "fit" and settings["weights"] is not None:
        more["weights"] = settings["weights"]
    getattr(trainer, command)(module, datamodule=data, ckpt_path=checkpoint, **more)
    if command == "fit" and not record.facts.get("pruned"):
        from trainer.record.measures import reason_without_updates

        if problem := reason_without_updates(trainer):
            raise TrainerError(problem)


@contextmanager
def _last_has_to_exist(settings: dict[str, Any]) -> Iterator[None]:
    """Where a command is for the last checkpoint and there is none, raise, where Lightning warns and starts anew."""
    if settings["ckpt_path"] == "last":
        warnings.filterwarnings("error", r'\.\w+\(ckpt_path="last"\) is set, but there is no last checkpoint')
    try:
        yield
    except UserWarning as warned:
        if "no last checkpoint" not in str(warned):
            raise
        nodes = [node for node in (settings["callbacks"] or {}).values() if isinstance(node, dict)]
        folders = ", ".join(str(node["dirpath"]) for node in nodes if node.get("dirpath") and "save_last" in node)
        raise UsageError(
            f"ckpt_path is last, and there is none in {folders or 'any folder of this run'}. To go on with a run, or to"
            f" use its weights: python -m trainer {settings['command']} ckpt=RUN, its folder. With resume=auto the same"
            " fit goes on where it stopped, and starts anew where there is nothing."
        ) from warned


def _last_line(run: RunRecord) -> str:
    """What a run says at its end where it shows no summary."""
    names = worth_showing(run.metrics)[:_MOST_METRICS] if is_quiet() else []
    metrics = ", ".join(f"{name}={run.metrics[name]:.4g}" for name in names)
    rate = run.samples_per_second
    speed = "" if rate is None or is_quiet() else f", {rate:,.1f} samples/s"
    line = f"{run.command} {run.status} in {run.seconds:.1f} s{speed}" + (f": {metrics}" if metrics else "")
    return f"{line}. Everything is in {from_here(run.folder)}"


def _shows_summary(trainer: Any) -> bool:
    from trainer.callbacks import RunSummary

    return any(isinstance(callback, RunSummary) for callback in trainer.callbacks)


def _predict(folder: Path, module: Any, data: Any, trainer: Any, checkpoint: str | None) -> None:
    """Predict; what no callback writes is kept and goes to ``predictions.pt``."""
    import torch
    from lightning.pytorch.callbacks import BasePredictionWriter

    is_written = any(isinstance(callback, BasePredictionWriter) for callback in trainer.callbacks)
    predictions = trainer.predict(
        module, datamodule=data, ckpt_path=checkpoint, return_predictions=False if is_written else None
    )
    if not is_written:
        name = "predictions.pt" if trainer.world_size == 1 else f"predictions_{trainer.global_rank}.pt"
        torch.save(predictions, folder / name)


def _complete(record: RunRecord, trainer: Any, started: float, status: str, error: str | None = None) -> None:
    """Add to the record what it lacks: all of it, where this was no fit, or nobody has recorded it."""
    facts = record.facts
    if facts["status"] == "running" and trainer is not None:
        from trainer.record.measures import facts_of

        try:
            facts |= facts_of(trainer)
        except Exception:  # what the user has to see is how the run has ended
            log.warning("The run's record is not complete.", exc_info=True)
    facts |= {"status": "pruned" if status == "completed" and facts.get("pruned") else status, "error": error}
    facts.setdefault("seconds", round(time.monotonic() - started, 3))


def _has_added_nothing(trainer: Any, record: RunRecord) -> bool:
    """Whether a run that was complete has been resumed, and is where it was."""
    goes_on = record.facts["command"] == "fit" and getattr(trainer, "ckpt_path", None) is not None
    return (
        goes_on
        and record.facts["status"] == "completed"
        and all(record.former.get(key) == record.facts.get(key) for key in ("status", "epochs", "steps"))
    )


def _goal(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The metric that is optimised, which way it is better, and its value; None where nothing says which that is."""
    chosen = choose(settings.get("objective"), facts.get("monitor") or monitored(settings.get("callbacks")))
    if chosen is None:
        return None
    goal = {"metric": chosen[0], "mode": chosen[1]}
    return goal | {"value": RunRecord({**facts, "objective": goal}, None).objective_value}


def _warn_of_missing_objective(settings: Mapping[str, Any], run: RunRecord) -> None:
    asked = (settings.get("objective") or {}).get("metric")
    if run.command == "fit" and run.completed and asked is not None and asked not in run.metrics:
        log.warning(
            "objective.metric is %s, which the run has not logged.%s Logged: %s.",
            asked,
            did_you_mean(asked, run.metrics),
            ", ".join(run.metrics) or "nothing",
        )
