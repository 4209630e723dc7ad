"""One run: from the config to objects, from objects to a result. The only module here that needs torch."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer import machine, redaction
from trainer.cli import failure
from trainer.cli.arguments import UsageError
from trainer.cli.build import check, make
from trainer.cli.compose import resolve
from trainer.cli.folders import merge_recipes
from trainer.cli.objective import choose, monitored, reached, value_of
from trainer.cli.processes import end_with_parent, imports_only, is_first, is_quiet
from trainer.cli.restore import recipe_of
from trainer.cli.results import read_result, write_result
from trainer.cli.targets import Allowlist
from trainer.cli.warned import noted
from trainer.errors import ConfigurationError, FolderInUseError, did_you_mean
from trainer.record.environment import write_environment

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
        from trainer.cli.compare import as_fit
        from trainer.cli.sweep.jobs import run_job

        return run_job(config, as_fit) if config.command == "compare" else run_job(config)
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
    result: dict[str, Any] = {
        "command": config.command,
        "recipe": hydra.runtime.choices.get("recipe") or recipe_of(config.get("ckpt")),
        "precision": hydra.runtime.choices.get("precision"),
        "seed": config.seed,
        "overrides": redaction.containers(OmegaConf.to_container(hydra.overrides.task, resolve=False)),
        "run_dir": str(folder),
        "status": "failed",
    }
    for handler in logging.getLogger().handlers:
        handler.addFilter(redaction.Filter())
    end_with_parent()
    former, is_ours = read_result(folder), True
    trainer, settings = None, dict[str, Any]()
    started = time.monotonic()
    try:
        settings = resolve(config)
        if is_first():
            _redact_dumps(folder, hydra.output_subdir)
            with suppress(OSError):  # no reason to fail a run
                write_environment(folder)
        module, data, trainer = assemble(settings, folder)
        started = time.monotonic()  # importing and building is not what a run is compared by
        _execute(settings, folder, module, data, trainer)
        is_pruned = any(getattr(callback, "pruned", False) for callback in getattr(trainer, "callbacks", ()))
        result["status"] = "pruned" if is_pruned else "completed"
    except (KeyboardInterrupt, SystemExit) as error:
        result["status"] = "interrupted"
        if isinstance(error.__context__, BrokenPipeError):  # rich makes an exit of it
            log.error("Nobody reads what the run prints any more, as after `| head`, so it has ended; -q prints less.")
        if isinstance(error.__context__, KeyboardInterrupt):  # what the Trainer makes of a Ctrl-C
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        is_ours = not isinstance(error, FolderInUseError)  # or another run will say how it went
        result["error"] = redaction.text(f"{type(error).__name__}: {error}")
        failure.explain_path(error, settings)
        failure.record(error, folder, config.command, getattr(trainer, "world_size", 1))
        raise
    finally:
        result["seconds"] = round(time.monotonic() - started, 3)
        result |= _facts(trainer)
        result["objective"] = _objective(config, result)
        if trainer is not None:
            result["precision"] = trainer.precision  # the one that `auto` has become
        if _has_added_nothing(trainer, result, former):
            result = former  # it tells more: how long it took, for example
            log.info("Nothing was left to do: the run in %s is complete.", folder)
        if is_first() and is_ours:
            write_result(folder, result)
    if is_first() and not is_quiet() and "inference_speed" in result:
        from trainer.callbacks.inference_speed import in_words

        print(in_words(result["inference_speed"]))
    if is_first() and (is_quiet() or config.command != "fit"):
        print(_last_line(result, folder), flush=True)
    return value_of(result)


def assemble(settings: dict[str, Any], folder: Path) -> tuple[Any, Any, Any]:
    """The LightningModule, the LightningDataModule (or None) and the Trainer that the config describes.

    Args:
        settings: the resolved config, as plain containers.
        folder: of the run; the Trainer's ``default_root_dir``.
    """
    arguments = dict(settings["trainer"])
    target = arguments.pop("_target_")
    allowlist = Allowlist(settings["allowed_packages"], settings.get("ckpt"))
    with imports_only():  # everything is found and checked before anything is made
        import lightning as L
        from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar

        from trainer.callbacks import OverflowReport, ScaleMonitor

        merge_recipes()
        if settings["seed"] is not None:
            L.seed_everything(settings["seed"], workers=True, verbose=False)
        check({name: settings[name] for name in _MADE} | {"trainer": arguments}, "", allowlist)
        trainer_class = allowlist.locate(target, "trainer")

    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).handlers.clear()  # the terminal and the file that Hydra has set up are enough
    # Whoever limits the batches, or has few, knows that a logger gets less than 50 steps; the recipes set what it gets.
    warnings.filterwarnings("ignore", "The number of training batches", UserWarning)
    # `checks` measures what workers would gain, and the recipes have the number that suits their data.
    warnings.filterwarnings("ignore", ".*does not have many workers", UserWarning)
    # A run that goes on from a checkpoint in a folder of its own keeps its own best checkpoints: meant to be so.
    warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
    arguments = make(arguments, "trainer", allowlist)
    if arguments.get("resume") is None and arguments.get("exact_resume") is True:
        del arguments["resume"], arguments["exact_resume"]  # a Trainer of somebody else's need not know them
    arguments["default_root_dir"] = arguments["default_root_dir"] or str(folder)
    arguments["precision"] = make(settings["precision"], "precision", allowlist)
    arguments["callbacks"] = _make_all(settings["callbacks"], "callbacks", allowlist)
    arguments["logger"] = _make_all(settings["logger"], "logger", allowlist) or False
    unwanted: tuple[type, ...] = ()  # what the default config, or a recipe, has put there
    if arguments["barebones"]:
        unwanted = (Checkpoint, LearningRateMonitor, ScaleMonitor)
        arguments["logger"], arguments["log_every_n_steps"] = False, None
    elif arguments["enable_checkpointing"] is False:
        unwanted = (Checkpoint,)
    if is_quiet():
        unwanted = (*unwanted, ModelSummary, ProgressBar)
        arguments["enable_progress_bar"] = arguments["enable_model_summary"] = False
        logging.getLogger(ADVICE).handlers.clear()
    arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, unwanted)]
    _report_into(folder, arguments)

    data = make(settings["data"], "data", allowlist)
    module = make(settings["model"], "model", allowlist)
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
    for callback in trainer.callbacks:
        if isinstance(callback, OverflowReport) and callback.dirpath is None:
            callback.dirpath = folder
    if is_first() and not is_quiet() and (said := getattr(arguments["precision"], "said", "")):
        print(said, file=sys.stderr)  # in the log as well; but who asked for "auto" wants to see it
    return module, data, trainer


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


def _report_into(folder: Path, arguments: dict[str, Any]) -> None:
    """Have the Trainer's default reports written beside the config, not into the folder of a logger."""
    from rich.console import Console

    from trainer.callbacks import Curves, RunSummary

    writes = bool(arguments["logger"]) and not arguments["fast_dev_run"]
    if arguments["barebones"]:
        return
    if writes and not any(isinstance(callback, Curves) for callback in arguments["callbacks"]):
        arguments["callbacks"].append(Curves(folder))
    shows = arguments["enable_progress_bar"] is not False
    if (shows or is_quiet()) and not any(isinstance(callback, RunSummary) for callback in arguments["callbacks"]):
        console = None if shows else Console(file=io.StringIO())
        arguments["callbacks"].append(RunSummary(folder, console, writes=writes))


def _make_all(nodes: dict[str, Any] | None, key: str, allowlist: Allowlist) -> list[Any]:
    """The objects of a group of named nodes; without a target are those a recipe sets but nobody chose."""
    return [
        make(node, f"{key}.{name}", allowlist) for name, node in (nodes or {}).items() if node and "_target_" in node
    ]


def _execute(settings: dict[str, Any], folder: Path, module: Any, data: Any, trainer: Any) -> None:
    command, checkpoint = settings["command"], settings["ckpt_path"]
    if command != "fit" and checkpoint is None and is_first():
        log.warning(
            "%s uses fresh weights. For those of a run, and its config: ckpt=RUN, its folder or a checkpoint.",
            command,
        )
    if command == "predict":
        _predict(folder, module, data, trainer, checkpoint)
        return
    more = {"verbose": False} if command in ("validate", "test") and is_quiet() else {}
    getattr(trainer, command)(module, datamodule=data, ckpt_path=checkpoint, **more)


def _last_line(result: dict[str, Any], folder: Path) -> str:
    """What a run says at its end where it shows no summary."""
    found = result["metrics"] if is_quiet() else {}
    names = sorted(found, key=lambda name: (not name.startswith(("val", "test")), name))
    names = [name for name in names if (both := re.sub("_(step|epoch)$", "", name)) == name or both not in found]
    metrics = ", ".join(f"{name}={found[name]:.4g}" for name in names[:_MOST_METRICS])
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    told = f"{result['command']} {result['status']} in {result['seconds']:.1f} s"
    return f"{told}: {metrics}. Everything is in {shown}" if metrics else f"{told}. Everything is in {shown}"


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


def _has_added_nothing(trainer: Any, result: dict[str, Any], former: dict[str, Any]) -> bool:
    """Whether a run that was complete has been resumed, and is where it was."""
    goes_on = result["command"] == "fit" and getattr(trainer, "ckpt_path", None) is not None
    return (
        goes_on
        and result["status"] == "completed"
        and all(former.get(key) == result[key] for key in ("status", "epochs", "steps"))
    )


def _facts(trainer: Any) -> dict[str, Any]:
    """What the table of a sweep, and a comparison, show of a run, as far as it came."""
    scaler = getattr(trainer, "scaler", None)
    metrics = getattr(trainer, "callback_metrics", {})
    facts = {
        "epochs": getattr(trainer, "current_epoch", None),
        "steps": getattr(trainer, "global_step", None),
        "skipped_steps": getattr(trainer, "skipped_steps", None),
        "scale": scaler.get_scale() if scaler is not None and scaler.is_enabled() else None,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "peak_memory": _peak_memory(),
    }
    return facts if trainer is None else facts | _measured(trainer)


def _objective(config: DictConfig, result: dict[str, Any]) -> dict[str, Any] | None:
    """The metric that is optimised, and its value; None where nothing says which that is."""
    metrics, asked = result["metrics"], OmegaConf.select(config, "objective.metric")
    if config.command == "fit" and result["status"] == "completed" and asked is not None and asked not in metrics:
        log.warning(
            "objective.metric is %s, which the run has not logged.%s Logged: %s.",
            asked,
            did_you_mean(asked, metrics),
            ", ".join(metrics) or "nothing",
        )
    monitor = result.get("monitor") or monitored(config.get("callbacks"))
    return reached(choose(config.get("objective"), monitor), metrics)


def _measured(trainer: Any) -> dict[str, Any]:
    """The device, and what callbacks know: which metric matters, and how fast it went."""
    from trainer.callbacks.inference_speed import InferenceSpeed
    from trainer.callbacks.run_summary import devices_of
    from trainer.callbacks.throughput import Throughput

    facts: dict[str, Any] = {"trained_in": str(trainer.precision), "devices": devices_of(trainer), "gpu": _gpu(trainer)}
    for callback in (trainer.checkpoint_callback, trainer.early_stopping_callback):
        if getattr(callback, "monitor", None):
            facts["monitor"] = {"metric": callback.monitor, "mode": callback.mode}
            break
    for callback in trainer.callbacks:
        if isinstance(callback, InferenceSpeed) and callback.result is not None:
            facts["inference_speed"] = callback.result
        if isinstance(callback, Throughput):
            facts["throughput"] = {
                "samples_per_second": callback.samples_per_second,
                "train_seconds": callback.train_seconds,
                "measured_batches": callback.measured_batches,
                "waiting": callback.waiting,
                "batches": callback.batches,
            }
    return facts


def _gpu(trainer: Any) -> dict[str, Any] | None:
    """Whether the GPU has Tensor Cores, and where float32 uses them; None on another device."""
    import torch

    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    # Not allow_tf32, whose reading raises where a user has set fp32_precision.
    float32 = {
        "matrix products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # made at run time
    }
    return {
        "capability": list(torch.cuda.get_device_capability(device)),
        "tf32": [operation for operation, precision in float32.items() if precision == "tf32"],
    }


def _peak_memory() -> dict[str, int]:
    """Bytes: torch's largest allocation on a GPU, else the largest size of the process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return {"gpu": torch.cuda.max_memory_allocated()}
    peak = machine.peak_memory()
    return {"process": peak} if peak else {}
