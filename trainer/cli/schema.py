"""The types of the config's ``trainer`` node: every argument of `trainer.Trainer` that a config can give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainer.errors import did_you_mean

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
STRATEGIES = (
    "auto",
    "ddp",
    "ddp_find_unused_parameters_true",
    "ddp_find_unused_parameters_false",
    "ddp_spawn",
    "ddp_spawn_find_unused_parameters_true",
    "ddp_spawn_find_unused_parameters_false",
    "ddp_fork",
    "ddp_fork_find_unused_parameters_true",
    "ddp_fork_find_unused_parameters_false",
    "ddp_notebook",
    "ddp_notebook_find_unused_parameters_true",
    "ddp_notebook_find_unused_parameters_false",
    "fsdp",
    "fsdp_cpu_offload",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
    "single_device",
    "single_tpu",
    "single_xla",
    "xla",
    "xla_debug",
    "xla_fsdp",
)


@dataclass
class TrainerSettings:
    """Names and defaults as in `trainer.Trainer`; ``precision``, ``callbacks`` and ``logger`` are config
    groups.

    OmegaConf holds every value to its type. What it has no type for is Any here, and checked by `mistake`.
    """

    _target_: str = "trainer.Trainer"
    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    fast_dev_run: bool | int = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None  # "DD:HH:MM:SS", or the arguments of a timedelta
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: Any = None  # a number, "DD:HH:MM:SS", or the arguments of a timedelta
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int | None = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: Any = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Any = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | None = None
    enable_autolog_hparams: bool = True
    model_registry: str | None = None
    resume: str | None = None
    exact_resume: bool = True
    dataloader_timeout: float = 1800.0


TYPES = {field.name: str(field.type) for field in fields(TrainerSettings)}
"""The type of every setting, as it is written above."""

MEANINGS = {
    "accelerator": "the kind of device; auto: the best there is",
    "strategy": "how several processes work together: auto, ddp, ...",
    "devices": "how many, or a list of their indices; -1 for all",
    "num_nodes": "machines",
    "fast_dev_run": "true: one batch of everything, and nothing is written",
    "max_epochs": "epochs to train; -1 for no end",
    "min_epochs": "epochs to train before anything may stop the run",
    "max_steps": "optimizer steps to train; -1 for no end",
    "min_steps": "optimizer steps to train before anything may stop the run",
    "max_time": "when to stop: 00:12:00:00 is days, hours, minutes and seconds",
    "limit_train_batches": "batches of an epoch, or a share of them, to train on",
    "limit_val_batches": "batches, or a share of them, to validate on; 0: no validation",
    "limit_test_batches": "batches, or a share of them, to test on",
    "limit_predict_batches": "batches, or a share of them, to predict on",
    "overfit_batches": "train and validate on the same few batches",
    "val_check_interval": "batches, a share of an epoch, or a time, between two validations",
    "check_val_every_n_epoch": "epochs between two validations",
    "num_sanity_val_steps": "validation batches to try before training begins",
    "log_every_n_steps": "optimizer steps between two rows for the loggers",
    "enable_checkpointing": "whether checkpoints are written",
    "enable_progress_bar": "whether there is a progress bar, and a summary at the end",
    "enable_model_summary": "whether a table of the layers is printed",
    "accumulate_grad_batches": "batches that make one optimizer step",
    "gradient_clip_val": "the largest norm of the gradients; null: any",
    "gradient_clip_algorithm": "norm: of all gradients together; value: each element",
    "deterministic": "true: only operations that always give the same result",
    "benchmark": "true: have cuDNN try which convolution is fastest",
    "inference_mode": "whether evaluation runs in torch.inference_mode",
    "use_distributed_sampler": "whether each process gets its share of the data",
    "profiler": "simple, advanced, pytorch, or null",
    "detect_anomaly": "true: stop at the operation whose backward made the first NaN; slow",
    "barebones": "true: without anything that costs time",
    "plugins": "strategies' parts of your own",
    "sync_batchnorm": "true: batch normalisation over all processes",
    "reload_dataloaders_every_n_epochs": "epochs between two calls of train_dataloader(); 0: one call",
    "default_root_dir": "where to write what has no folder of its own; null: the run's folder",
    "enable_autolog_hparams": "whether the module's hyper-parameters go to the loggers",
    "model_registry": "the name of a model in Lightning's registry",
    "resume": "auto: go on from the newest checkpoint of the same command",
    "exact_resume": "false: resume also where the result may differ",
    "dataloader_timeout": "seconds that workers may take for a batch; 0: any time",
}
"""What each of the settings is, in a few words; `trainer.Trainer` and Lightning's documentation say more."""

# The words that the settings of type Any understand; None stands for null.
_WORDS: dict[str, tuple[str | bool | None, ...]] = {
    "accelerator": ACCELERATORS,
    "strategy": STRATEGIES,
    "gradient_clip_algorithm": ("norm", "value", None),
    "deterministic": (True, False, "warn", None),
    "resume": ("auto", None),
    "profiler": ("simple", "advanced", "pytorch", "xla", None),
}

# The smallest value of settings that are numbers, and what it or the one above means.
_LEAST: dict[str, tuple[int, str]] = {
    "num_nodes": (1, ""),
    "fast_dev_run": (0, ""),
    "max_epochs": (-1, ", or -1 for no end"),
    "min_epochs": (0, ""),
    "max_steps": (-1, ", or -1 for no end"),
    "min_steps": (0, ""),
    "limit_train_batches": (0, ""),
    "limit_val_batches": (0, ""),
    "limit_test_batches": (0, ""),
    "limit_predict_batches": (0, ""),
    "overfit_batches": (0, ""),
    "check_val_every_n_epoch": (1, ", or null to count batches across epochs"),
    "num_sanity_val_steps": (-1, ", or -1 for all batches"),
    "log_every_n_steps": (0, ""),
    "accumulate_grad_batches": (1, ""),
    "gradient_clip_val": (0, ""),
    "reload_dataloaders_every_n_epochs": (0, ""),
    "dataloader_timeout": (0, ""),
}

# A float is a share of the batches there are.
_SHARES = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
)

# The units of a node in the place of a time, those of `datetime.timedelta`.
_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


def mistake(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with the settings of type Any, as a sentence; None when they are fine.

    Args:
        settings: the resolved ``trainer`` node, as plain values.
    """
    for name, words in _WORDS.items():
        value = settings.get(name)
        if value not in words and not _is_node(value):
            written = [describe(word) for word in words]
            shown = written if len(written) < 10 else [*written[:3], "another of Lightning's"]
            return (
                f"trainer.{name} is {describe(value)}, expected {either(shown)}."
                f"{did_you_mean(describe(value), written)}"
            )
    for name, other in (("val_check_interval", "a number of batches, a share of an epoch, "), ("max_time", "")):
        value = settings.get(name)
        if not (value is None or _is_time(value) or (other and _is_number(value))):
            unknown = [unit for unit in value if unit not in _UNITS] if isinstance(value, Mapping) else []
            hint = did_you_mean(str(unknown[0]), _UNITS) if unknown else ""
            return (
                f"trainer.{name} is {describe(value)}, expected {other}a time such as 00:12:00:00 (days, hours, minutes"
                f" and seconds) or '{{hours: 12}}', or null.{hint}"
            )
    if problem := _out_of_range(settings):
        return problem
    devices = settings.get("devices")
    if not _is_devices(devices):
        return (
            f"trainer.devices is {describe(devices)}, expected a number of devices of at least 1, a list of their"
            f" indices such as [0,1], -1 for all, or auto.{did_you_mean(str(devices), ['auto'])}"
        )
    return None


def _out_of_range(settings: Mapping[str, Any]) -> str | None:
    for name, value in settings.items():
        if isinstance(value, int) and value >= 2**63:
            return f"trainer.{name} is {value}, expected a number that fits in 64 bits."
    for name, (least, meaning) in _LEAST.items():
        value = settings.get(name)
        if isinstance(value, (int, float)) and not value >= least:
            at_least = max(least, 0) if meaning and least < 0 else least
            return f"trainer.{name} is {describe(value)}, expected at least {at_least}{meaning}."
    for name in _SHARES:
        value = settings.get(name)
        if isinstance(value, float) and not value <= 1.0:
            return (
                f"trainer.{name} is {describe(value)}, expected a share of the batches, of at most 1.0, or a whole"
                f" number of them{f', such as {round(value)}' if math.isfinite(value) else ''}."
            )
    value = settings.get("val_check_interval")
    if (isinstance(value, (int, float)) and not value > 0) or (
        value is not None and _is_time(value) and _is_zero(value)
    ):
        return (
            f"trainer.val_check_interval is {describe(value)}, expected more than 0. To do without validation, write"
            " trainer.limit_val_batches=0."
        )
    for unit in ("epochs", "steps"):
        low, high = settings.get(f"min_{unit}"), settings.get(f"max_{unit}")
        if isinstance(low, int) and isinstance(high, int) and -1 < high < low:
            return f"trainer.min_{unit} is {low} and trainer.max_{unit} is {high}: expected no more than that."
    return None


def describe(value: Any) -> str:
    """``value`` as one would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "empty"


def expected(annotation: str) -> str:
    """A type annotation in words.

    >>> expected("int | float | None")
    'a whole number, a number or null'
    >>> expected("bool | None")
    'true, false or null'
    """
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true, false",
        "str": "text",
        "None": "null",
        "Any": "a value",
    }
    return either([words.get(part, part) for part in annotation.split(" | ")])


def either(words: list[str]) -> str:
    """``a, b or c``."""
    words = ", ".join(words).split(", ")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    if isinstance(value, Mapping):
        amounts = value.values()
        return (
            len(value) > 0 and set(value) <= set(_UNITS) and all(_is_number(a) and 0 <= a < math.inf for a in amounts)
        )
    parts = value.split(":") if isinstance(value, str) else []
    return len(parts) == 4 and all(part.strip().isdecimal() for part in parts)


def _is_zero(time: Any) -> bool:
    return not any(time.values() if isinstance(time, Mapping) else map(int, time.split(":")))


def _is_devices(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        return value == "auto" or all(part.strip().lstrip("-").isdigit() for part in value.split(","))
    if isinstance(value, (list, tuple)):
        indices = all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in value)
        return 0 < len(value) == len(set(value)) and indices
    return isinstance(value, int) and (value >= 1 or value == -1)
