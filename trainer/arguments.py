"""The Trainer's arguments, each described once. Imports neither torch nor Lightning.

``ARGUMENTS`` holds the default, the accepted values and the meaning of each argument. When a Trainer is created, it
checks its arguments against this table. The command line takes the types, the help texts and the error messages of a
config's ``trainer`` node from it. A mistake gets the same message in Python and on the command line.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any, NamedTuple

from trainer.errors import ONE_PACKAGE, ArgumentError, ConfigurationError, did_you_mean

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
_DEEPSPEED: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed_stage_1": {"stage": 1},
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
"""Lightning's names, and the arguments of `DeepSpeedStrategy` that they stand for."""
_UNUSED = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
STRATEGIES = (
    "auto",
    *(f"ddp{start}{unused}" for start in ("", "_spawn", "_fork", "_notebook") for unused in _UNUSED),
    *_DEEPSPEED,
    *("fsdp", "fsdp_cpu_offload", "single_device", "single_tpu", "single_xla", "xla", "xla_debug", "xla_fsdp"),
)
PROFILERS = ("simple", "advanced", "pytorch", "xla")
UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")
"""The units of a time that is given as a mapping: the arguments of `datetime.timedelta`."""


def seconds(time: Any) -> float | None:
    """Return a time in seconds, from ``"DD:HH:MM:SS"``, a mapping of units or a timedelta. None for any other value."""
    if isinstance(time, str):
        parts = time.split(":")
        if len(parts) != 4 or not all(number.strip().isdecimal() for number in parts):
            return None
        time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts), strict=True))
    if isinstance(time, Mapping):
        has_units = bool(time) and set(time) <= set(UNITS)
        if not (has_units and all(_is_number(a) and 0 <= a < math.inf for a in time.values())):
            return None
        try:
            time = timedelta(**time)
        except OverflowError:
            return None
    return time.total_seconds() if isinstance(time, timedelta) else None


def deepspeed_settings(name: Any) -> dict[str, Any] | None:
    """Return the arguments of `DeepSpeedStrategy` that a strategy's name stands for. None for other names."""
    return _DEEPSPEED.get(name.lower()) if isinstance(name, str) else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    """Return whether ``value`` is a whole number (an int, or a float such as 1e6) or inf, as in Lightning."""
    return _is_whole(value) or (isinstance(value, float) and (value.is_integer() or value == math.inf))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_object(value: Any) -> bool:
    """Return whether ``value`` is an instance of a class or, in a config, a node with a ``_target_``."""
    if isinstance(value, Mapping):
        return "_target_" in value
    return not isinstance(value, (str, bytes, Real, list, tuple, set, NoneType))


def _is_devices(value: Any) -> bool:
    if isinstance(value, str):  # "2," is a list of one index, as in Lightning
        return all(index.strip().lstrip("-").isdigit() for index in value.rstrip(", ").split(","))
    if isinstance(value, (list, tuple)):
        return 0 < len(value) == len(set(map(str, value))) and all(_is_whole(index) and index >= 0 for index in value)
    return _is_whole(value) and (value >= 1 or value == -1)


class Kind(NamedTuple):
    """A kind of value, and its range.

    Attributes:
        words: the name of the kind in messages; "" if messages do not mention it.
        includes: returns whether a value is of this kind.
        least: the smallest allowed number.
        above: a number must be larger than this. None if ``least`` is the limit.
        most: the largest allowed number.
        otherwise: the text that follows the range in a message.
        is_share: whether a number is a fraction of the batches, and thus at most 1.0. Default: False.
    """

    words: str
    includes: Callable[[Any], bool]
    least: float = -math.inf
    above: float | None = None
    most: float = math.inf
    otherwise: str = ""
    is_share: bool = False

    def at_least(self, least: int, otherwise: str = "") -> Kind:
        """Return this kind, limited to numbers of at least ``least``."""
        return self._replace(least=least, otherwise=otherwise)

    def expected_range(self, value: Any) -> str | None:
        """Return the expected range if ``value``, which is of this kind, is out of range. Otherwise return None."""
        number = value if _is_number(value) else seconds(value)
        if number is None:
            return None
        if _is_whole(number) and number >= 2**63:
            return "a number that fits in 64 bits."
        if self.above is not None and not number > self.above:
            return f"more than {self.above}{self.otherwise}."
        if not number >= self.least:
            return f"at least {max(self.least, 0)}{self.otherwise}."
        if self.is_share and not number <= 1:
            example = f", such as {round(number)}" if math.isfinite(number) else ""
            return f"a fraction of the batches of at most 1.0, or a whole number of batches{example}."
        return None if number <= self.most else f"at most {self.most}."


WHOLE = Kind("a whole number", _is_whole)
COUNT = Kind("a whole number", _is_count).at_least(0)
ENDLESS = COUNT.at_least(-1, ", or -1 for no limit")
NUMBER = Kind("a number", _is_number).at_least(0)
TEXT = Kind("text", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, (str, PathLike)))
TIME = Kind(
    "a time such as 00:12:00:00 (days, hours, minutes and seconds) or '{hours: 12}'",
    lambda value: (given := seconds(value)) is not None and given >= 0,
)
DEVICES = Kind("a number of devices of at least 1, a list of their indices such as [0,1], -1 for all", _is_devices)
OBJECT = Kind("", _is_object)
OFF = Kind("", lambda value: value is False)  # as in Lightning, False turns a feature off
SWITCH = (True, False)
AMOUNT = (
    WHOLE.at_least(0)._replace(words="a whole number of batches"),
    NUMBER._replace(words="a fraction of the batches", is_share=True),
    OFF,
)


_POSITIVE: dict[str, Any] = {"above": 0, "otherwise": ". To disable validation, set limit_val_batches to 0"}
_INTERVAL = (
    WHOLE._replace(words="a number of batches", **_POSITIVE),
    NUMBER._replace(words="a fraction of an epoch", is_share=True, **_POSITIVE),
    TIME._replace(**_POSITIVE),
    None,
)
_EPOCHS = WHOLE.at_least(1, ", or null to count batches across epochs")
_SANITY = COUNT.at_least(-1, ", or -1 for all batches")
_CLIP_LIMIT = (COUNT._replace(words=""), NUMBER, OFF, None)
_AT_LEAST_0 = WHOLE.at_least(0)
_SECONDS = NUMBER._replace(most=10**9)


@dataclass(frozen=True)
class Argument:
    """One argument of the Trainer. Texts are written for a config, with ``null`` for None.

    Attributes:
        name: the name in the signature of ``Trainer``.
        default: the default in the signature of ``Trainer``.
        meaning: a short description.
        accepts: the accepted values: each item is a kind or a single value (a word, True, False or None). Empty if
            other code checks the value.
        any_case: whether words such as ``"Norm"`` are accepted in Python in upper or lower case, as in Lightning.
            Default: False.
    """

    name: str
    default: Any
    meaning: str
    accepts: tuple[Any, ...] = ()
    any_case: bool = False

    @property
    def choices(self) -> list[str]:
        """The words that the argument accepts."""
        return [describe(choice) for choice in self.accepts if not isinstance(choice, Kind) and choice is not None]

    @property
    def expected(self) -> str:
        """Description of the accepted values.

        >>> ARGUMENTS["benchmark"].expected
        'true, false or null'
        """
        words = [accepted.words if isinstance(accepted, Kind) else describe(accepted) for accepted in self.accepts]
        words = [word for word in words if word]
        return join_alternatives(words if len(words) < 10 else [*words[:3], "another of Lightning's"])

    def mistake(self, value: Any, key: str | None = None, registered: Collection[str] = ()) -> str | None:
        """Return a sentence about the mistake in ``value``. None if it is accepted.

        Args:
            value: the given value.
            key: the config's key, such as ``trainer.devices``. None for an argument in Python. The sentence then has
                None instead of ``null``. Like Lightning, Python accepts more values than a config: None for False, 2.0
                for two batches, and words in capitals.
            registered: additional accepted words. Default: none.
        """
        is_accepted = key is None and self._is_lightning_object(value)
        wanted = None if is_accepted else self._expected(value, registered)
        if key is None:
            return wanted and f"{self.name} is {value!r}, expected {to_python(wanted)}"
        return wanted and f"{key} is {describe(value)}, expected {wanted}"

    def _is_lightning_object(self, value: Any) -> bool:
        if value is None:
            return self.accepts == SWITCH
        if any(isinstance(accepted, Kind) and accepted.is_share for accepted in self.accepts):
            return isinstance(value, float) and value > 1 and value.is_integer()
        return self.any_case and isinstance(value, str) and value.lower() in self.accepts

    def _expected(self, value: Any, registered: Collection[str]) -> str | None:
        """Return the expected values if ``value`` is not accepted, otherwise None."""
        if not self.accepts or any(_equals(value, accepted) for accepted in (*self.accepts, *registered)):
            return None
        for kind in self.accepts:
            if isinstance(kind, Kind) and kind.includes(value):
                return kind.expected_range(value)
        units = [str(unit) for unit in value if unit not in UNITS] if isinstance(value, Mapping) else []
        hint = did_you_mean(units[0], UNITS) if units else did_you_mean(describe(value), [*self.choices, *registered])
        return f"{self.expected}.{hint}"


_TABLE = (
    Argument("accelerator", "auto", "type of device; auto: the best available", (*ACCELERATORS, OBJECT)),
    Argument("strategy", "auto", "strategy for processes: auto, ddp, ...", (*STRATEGIES, OBJECT), any_case=True),
    Argument("devices", "auto", "number of devices, or a list of their indices; -1: all", (DEVICES, "auto")),
    Argument("num_nodes", 1, "number of nodes; auto: as torchrun or Slurm started", (COUNT.at_least(1), "auto")),
    Argument("precision", None, "32-true, 16-mixed, bf16-mixed, ..."),
    Argument("logger", None, "one or more loggers"),
    Argument("callbacks", None, "callbacks in addition to the default ones"),
    Argument("fast_dev_run", False, "true: run one batch of each stage, and write nothing", (*SWITCH, COUNT, None)),
    Argument("max_epochs", None, "epochs to train; -1: no limit", (ENDLESS, None)),
    Argument("min_epochs", None, "epochs to train before a callback may stop the run", (COUNT, None)),
    Argument("max_steps", -1, "optimizer steps to train; -1: no limit", (ENDLESS,)),
    Argument("min_steps", None, "optimizer steps to train before a callback may stop the run", (COUNT, None)),
    Argument("max_time", None, "time limit, such as 00:12:00:00 (days, hours, minutes, seconds)", (TIME, None)),
    Argument("limit_train_batches", None, "batches of an epoch, or a fraction of them, to train on", (*AMOUNT, None)),
    Argument("limit_val_batches", None, "batches, or a fraction of them, to validate on; 0: none", (*AMOUNT, None)),
    Argument("limit_test_batches", None, "batches, or a fraction of them, to test on", (*AMOUNT, None)),
    Argument("limit_predict_batches", None, "batches, or a fraction of them, to predict on", (*AMOUNT, None)),
    Argument("overfit_batches", 0.0, "few batches to train on in each epoch, and as many to validate on", AMOUNT),
    Argument("val_check_interval", None, "batches, a fraction of an epoch, or a time, between validations", _INTERVAL),
    Argument("check_val_every_n_epoch", 1, "epochs between two validations", (_EPOCHS, None)),
    Argument("num_sanity_val_steps", None, "validation batches to run before training", (_SANITY, None)),
    Argument("log_every_n_steps", None, "optimizer steps between two rows for the loggers", (COUNT, None)),
    Argument("enable_checkpointing", None, "whether checkpoints are written", (*SWITCH, None)),
    Argument("enable_progress_bar", None, "whether a progress bar is shown", (*SWITCH, None)),
    Argument("enable_model_summary", None, "whether a table of the layers is printed", (*SWITCH, None)),
    Argument("accumulate_grad_batches", 1, "batches per optimizer step", (WHOLE.at_least(1), None)),
    Argument("gradient_clip_val", None, "largest norm of the gradients; null: no clipping", _CLIP_LIMIT),
    Argument("gradient_clip_algorithm", None, "clip the norm, or each value", ("norm", "value", None), any_case=True),
    Argument("deterministic", None, "true: use only deterministic operations", (*SWITCH, "warn", None)),
    Argument("benchmark", None, "true: cuDNN benchmarks convolutions", (*SWITCH, None)),
    Argument("inference_mode", True, "whether evaluation runs in torch.inference_mode", SWITCH),
    Argument("use_distributed_sampler", True, "whether each process gets its share of the data", SWITCH),
    Argument("profiler", None, "simple, advanced, pytorch, or null", (*PROFILERS, None, OFF, OBJECT), any_case=True),
    Argument("detect_anomaly", False, "true: stop at the first operation with a NaN in its backward; slow", SWITCH),
    Argument("barebones", False, "true: no logging, checkpoints and other features that cost time", SWITCH),
    Argument("plugins", None, "plugins: a cluster environment, a checkpoint IO, ..."),
    Argument("sync_batchnorm", False, "true: synchronize batch normalization over all processes", SWITCH),
    Argument("reload_dataloaders_every_n_epochs", 0, "epochs between train_dataloader() calls; 0: one", (_AT_LEAST_0,)),
    Argument("default_root_dir", None, "default folder for all files; null: the folder of the run", (PATH, None)),
    Argument("enable_autolog_hparams", True, "whether the module's hyperparameters are logged", SWITCH),
    Argument("model_registry", None, "name of a model in Lightning's registry", (TEXT, None)),
    Argument("resume", None, "auto: resume from the last checkpoint of the same command", ("auto", None)),
    Argument("exact_resume", True, "false: resume even if the result may differ", SWITCH),
    Argument("dataloader_timeout", 1800.0, "seconds that workers may take for a batch; 0: no limit", (_SECONDS,)),
    Argument("pad_evaluation", False, "true: pad evaluation data to equally many samples in all processes", SWITCH),
    Argument(
        "prefetch_batches", 1, "batches copied to a GPU during the previous step", (_AT_LEAST_0._replace(most=1),)
    ),
)

ARGUMENTS = {argument.name: argument for argument in _TABLE}
"""All arguments of the Trainer by name, in the order of the signature."""


def check(given: Mapping[str, Any], **registered: Collection[str]) -> None:
    """Check arguments of the Trainer.

    Args:
        given: values by name. Names that are not arguments of the Trainer are ignored.
        **registered: additional accepted words, by the argument's name.

    Raises:
        ArgumentError: for the first value that is of the wrong kind, out of range, or an unknown word.
    """
    for name, argument in ARGUMENTS.items():
        if name in given and (problem := argument.mistake(given[name], registered=registered.get(name, ()))):
            raise ArgumentError(problem)


def describe(value: Any) -> str:
    """Return ``value`` as written in a config or on the command line; in quotes if it is blank or unprintable text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value and not (value.strip() and value.isprintable()):
        return repr(value)
    return str(value) or "empty"


def join_alternatives(words: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    words = ", ".join(words).split(", ")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


_IN_PYTHON = {"null": "None", "true": "True", "false": "False", "'{hours: 12}'": "{'hours': 12}"}
_IN_CONFIG = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in _IN_PYTHON))


def to_python(text: str) -> str:
    """Convert text about a config to Python's notation: None for ``null``, True for ``true``, False for ``false``."""
    return _IN_CONFIG.sub(lambda match: _IN_PYTHON[match[0]], text)


def _equals(value: Any, word: Any) -> bool:
    """Return whether ``value`` equals a single accepted value. 0 and 1 are equal to False and True."""
    if isinstance(word, bool):
        return isinstance(value, Real) and bool(value == word)
    return value is None if word is None else isinstance(value, str) and value == word


_AMOUNTS = (
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval",
)  # fmt: skip


def parse_limits(given: Mapping[str, Any], announce: Callable[[str], object] = str) -> dict[str, Any]:
    """Return how many batches to run for training, validation, test and prediction, and when to validate.

    Args:
        given: all arguments of the Trainer, already checked by `check`.
        announce: called with a message about how 1 and 1.0 are understood, because they are easily confused. Default: a
            no-op.

    Returns:
        The arguments, with limits converted to numbers of batches (int) or fractions of the batches (float).
        ``fast_dev_run`` overrides other limits. ``overfit_batches`` sets the limits of training and validation, also
        with ``fast_dev_run``, except a limit of 0. ``val_check_seconds`` is added: the seconds between validations, or
        None to count batches.

    Raises:
        ConfigurationError: if a fraction of an epoch is given while batches are counted across epochs, or if
            ``overfit_batches`` contradicts another limit.
    """
    interval, sanity_steps = given["val_check_interval"], given["num_sanity_val_steps"]
    if given["check_val_every_n_epoch"] is None and isinstance(interval, float):
        raise ConfigurationError(
            f"val_check_interval is {interval}, a fraction of an epoch, and check_val_every_n_epoch=None counts batches"
            " across epochs: expected a number of batches, or a time such as 00:12:00:00."
        )
    limits = {**given, **{name: _parse_limit(name, given, announce) for name in _AMOUNTS}}
    limits["val_check_seconds"] = seconds(interval)
    limits["num_sanity_val_steps"] = 2 if sanity_steps is None else math.inf if sanity_steps == -1 else sanity_steps
    if given["fast_dev_run"]:
        batches = int(given["fast_dev_run"])
        limits |= dict.fromkeys(_AMOUNTS, batches) | {"val_check_interval": 1.0, "val_check_seconds": None}
        limits |= {"max_steps": batches, "max_epochs": 1, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 1}
    if given["overfit_batches"]:
        limits["overfit_batches"] = amount = _parse_limit("overfit_batches", given, announce)
        for name in ("limit_train_batches", "limit_val_batches"):
            limit = limits[name]
            if limit == 0:  # no training, or no validation
                continue
            is_limited = isinstance(limit, int) or limit < 1.0
            if is_limited and limit != amount and not given["fast_dev_run"]:
                raise ConfigurationError(
                    f"overfit_batches is {amount}, and {name} is {limit}: expected one of them, or {name}=0."
                )
            limits[name] = amount
    return limits


class BatchInterval(int):
    """A number of batches between two validations. An interval of 1 batch does not equal 1.0, which is a whole epoch.

    This matters because Lightning's ModelCheckpoint and EarlyStopping run at the end of an epoch, instead of after each
    validation, if ``trainer.val_check_interval == 1.0``.
    """

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, float) and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def shown_interval(given: Any, limits: Mapping[str, Any]) -> Any:
    """Return ``trainer.val_check_interval``: the time as given, a number of batches, or a fraction of an epoch.

    Args:
        given: the argument ``val_check_interval``.
        limits: the return value of `parse_limits`.
    """
    interval = limits["val_check_interval"]
    if limits["val_check_seconds"] is not None:
        return given
    return BatchInterval(interval) if isinstance(interval, int) else interval


def _parse_limit(name: str, given: Mapping[str, Any], announce: Callable[[str], object]) -> int | float:
    """Return a number of batches (int) or a fraction of them (float); 1.0 for None and for a time."""
    amount = 0 if given[name] is False else given[name]
    if not _is_number(amount):
        return 1.0
    if amount == 1:
        announce(f"`Trainer({name}={amount})` was configured so {_describe_one(name, isinstance(amount, int))}.")
    return int(amount) if amount > 1 else amount


def _describe_one(name: str, is_one: bool) -> str:
    """Describe how 1, or 1.0, is understood."""
    if name == "val_check_interval":
        return f"validation will run {'after every batch' if is_one else 'at the end of the training epoch'}"
    amount = "1 batch" if is_one else "100% of the batches"
    return f"{amount} per epoch will be used" if name == "limit_train_batches" else f"{amount} will be used"


BAREBONES = (
    "enable_checkpointing", "logger", "enable_progress_bar", "log_every_n_steps", "enable_model_summary",
    "num_sanity_val_steps", "fast_dev_run", "detect_anomaly", "profiler",
)  # fmt: skip
"""The arguments that ``barebones=True`` switches off, because they can reduce the speed."""


def check_barebones(given: Mapping[str, Any]) -> None:
    """Refuse arguments that request a feature switched off by ``barebones=True``.

    Args:
        given: all arguments of the Trainer. None, False and 0 request nothing.

    Raises:
        ConfigurationError: for the first argument that requests such a feature.
    """
    for name in BAREBONES:
        if given[name] not in (None, 0):
            reason = f"{name} can reduce the speed, so it is disabled in barebones mode. Remove {name}."
            raise ConfigurationError(f"`Trainer(barebones=True, {name}={given[name]!r})` was passed. {reason}")


def refuse_other_package(argument: str, *given: Any) -> None:
    """Refuse objects built on ``pytorch_lightning`` if it is a separate package from ``lightning.pytorch``.

    A callback with no other base than its ``Callback``, such as MLflow's, is not refused: it has only hooks.

    Args:
        argument: the name of the argument, for the message.
        *given: modules, datamodules, callbacks, loggers, strategies, plugins, or any other values.

    Raises:
        ConfigurationError: for the first such object.
    """
    for value in given:
        bases = [f"{cls.__module__}.{cls.__name__}" for cls in type(value).__mro__]
        roots = {name.partition(".")[0] for name in bases if name != "pytorch_lightning.callbacks.callback.Callback"}
        for other, package in (("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric")):
            if other in roots and "lightning" not in roots and sys.modules.get(other) is not sys.modules.get(package):
                raise ConfigurationError(
                    f"Got {argument}={type(value).__name__}(...), which is built on {other}. The Trainer is built on"
                    f" {package}, which is a separate package for Python. To make them one, {ONE_PACKAGE}"
                )


def refuse_twice(argument: str, value: Any, default: Any, callbacks: Sequence[Any], kind: type) -> None:
    """Refuse a setting that is given both as an argument and as a callback.

    Raises:
        ConfigurationError: if ``value`` is neither None nor the default, and ``callbacks`` contains an instance of
            ``kind``.
    """
    if value not in (None, default) and any(isinstance(callback, kind) for callback in callbacks):
        both = f"Got {argument}={value!r} and a {kind.__name__} callback"
        raise ConfigurationError(f"{both}, expected one of them, because both set {argument}. Remove one.")
