"""Check a command line before anything expensive is imported. Errors suggest the nearest valid name."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.arguments import SWITCH, WHOLE, Kind, describe
from trainer.cli import plugins, tracking
from trainer.cli.compose import CONFIG_NAME, DEFAULTS_ADVICE, RESTORED, Composer, resolution_errors, resolve, unresolved
from trainer.cli.folders import packaged_conf
from trainer.cli.keys import options
from trainer.cli.objective import Objective
from trainer.cli.parsing import GROUPS_TO_ADD, Arguments, UsageError, canonical_precisions
from trainer.cli.processes import environment
from trainer.cli.restore import recipe_of, saved_config
from trainer.cli.schema import ACCEPTED, check_settings, mistake, read_settings, setting, walk
from trainer.cli.targets import Allowlist
from trainer.cli.workdir import path_override, quoted, sweeps
from trainer.common.terminal import command_line
from trainer.errors import did_you_mean
from trainer.record.find_checkpoint import checkpoints_in, find, find_weights, is_checkpoint_folder, run_of

_MOST_JOBS = 50
"""Largest number of jobs of a sweep that are composed and checked before the first one starts, at 0.1 s per job."""
_REQUIRED = (
    "allowed_packages", "callbacks", "checkpoint_files", "checks", "compare", "logger", "objective", "precision",
    "seed", "trainer", "tune",
)  # fmt: skip
"""Nodes that cannot be removed."""
_REPLACEABLE = ("data", "model", "optimizer", "scheduler")
"""Config groups with options that each configure one class."""
_NAMED_CHECKPOINTS = ("last", "best", "hpc")
_NOT_RESTORED = ("_partial_", "_target_", "capturable", "foreach", "fused")
"""Settings of an optimizer that a checkpoint does not replace, or that raise an error if they differ."""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


_FOLDER = Kind("a folder for the run", _is_path)
_NAME = Kind("a name without slashes", lambda value: _is_path(value) and "/" not in value)
_ROOT = {
    "seed": (WHOLE.at_least(0)._replace(most=2**32 - 1), None),
    "ckpt_path": (Kind("the path or URL of a file, best, last", _is_path), None),
    "weights": (Kind("the folder of a run, a checkpoint, a state dict, a .safetensors file", _is_path), None),
}


@dataclass(frozen=True)
class _CheckpointFiles:
    """The settings ``checkpoint_files.*``: the arguments of `trainer.CheckpointFiles`."""

    sharded: bool = setting(False, *SWITCH)
    asynchronous: bool = setting(False, *SWITCH)
    when_full: str = setting("stop", "stop", "continue")


def validate(arguments: Arguments, composer: Composer | None = None) -> DictConfig:
    """Check the config of a command line, and return it, including its node ``hydra``.

    For a sweep, return the config of the first job. Each value is checked once, in a job with the first value of all
    other settings.

    Args:
        arguments: the command line.
        composer: the composer of ``arguments``. Default: None, which creates one.

    Raises:
        UsageError: if the config is invalid. The message contains the given value, the expected value, and the nearest
            name.
    """
    composer = composer or Composer(arguments)
    overrides = composer.parse(arguments.config_overrides())
    for override in overrides:
        _check_option(composer, override)

    first = next(_jobs(overrides))
    config, before = _compose(composer, first)
    is_sweep = sweeps(arguments, config)
    if is_sweep:
        overrides = [*_sweeper_params(composer, config), *overrides]
    _check_mode(composer, config, overrides, is_sweep=is_sweep)
    jobs = list(islice(_jobs(overrides), _MOST_JOBS))
    composed = [_compose(composer, job) if job != first else (config, before) for job in jobs]
    if arguments.command == "compare":
        from trainer.cli import compare  # imported here because it is slow

        compare.check(config, jobs=math.prod(len(values) for values in _values(overrides)))
    folders: set[str] = set()
    HydraConfig.instance().set_config(composed[0][0])  # for ${hydra:...}
    _check_hydra(composed[0][0], is_sweep=is_sweep)
    for config, before in composed:
        HydraConfig.instance().set_config(config)
        if is_sweep:
            _check_folder_of_job(config, folders)
        _check_whole(composer, config, before, overrides)
    HydraConfig.instance().set_config(composed[0][0])
    return composed[0][0]


def _values(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the values of each override, as overrides without a sweep."""
    listed = []
    for override in overrides:
        values = [str(override.input_line)]
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in islice(_sweep(override), _MOST_JOBS)]
        if not values:
            raise UsageError(f"{override.input_line} has no values, expected at least one.")
        listed.append(values)
    return listed


def _sweep(override: Override) -> Iterator[str]:
    interval: Any = override.value()
    if override.is_interval_sweep():  # checking both ends is enough for all values between them
        yield from (str(interval.start), str(interval.end))
        return
    try:
        yield from override.sweep_string_iterator()
    except Exception as error:
        raise UsageError(f"Cannot sweep over {override.input_line!r}: {error}.") from error


def _jobs(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Iterate over jobs of the sweep, as lists of overrides. Each value occurs in at least one of the jobs."""
    values = _values(overrides)
    yield [choices[0] for choices in values]
    for position, choices in enumerate(values):
        for choice in choices[1:]:
            yield [choice if index == position else others[0] for index, others in enumerate(values)]


def _sweeper_params(composer: Composer, config: DictConfig) -> list[Override]:
    """Return the overrides in ``hydra.sweeper.params`` (set in conf/sweep), with full names of precisions."""
    params = dict(OmegaConf.select(config, "hydra.sweeper.params") or {})
    if "precision" in params:
        params["precision"] = canonical_precisions(str(params["precision"]))
        composer.arguments.overrides.append(f"hydra.sweeper.params.precision={quoted(params['precision'])}")
    overrides = composer.parse([f"{key}={value}" for key, value in params.items()])
    for override in overrides:
        _check_option(composer, override)
    return overrides


def _check_mode(composer: Composer, config: DictConfig, overrides: Sequence[Override], *, is_sweep: bool) -> None:
    """Refuse several values without ``-m``, intervals that no sweeper samples from, and settings without effect.

    A job of a sweep, which has ``hydra.mode=RUN``, may keep the settings of the sweep, and so may a config that is only
    shown.
    """
    may_keep = composer.arguments.shows or any(override.key_or_group == "hydra.mode" for override in overrides)
    for override in overrides:
        key, given = override.key_or_group, override.input_line
        if override.is_sweep_override() and not is_sweep:
            advice = "To run one job for each value, add -m. Quote a single value; put a list in brackets."
            raise UsageError(f"{given} has several values, expected one. {advice}")
        if override.is_interval_sweep() and "BasicSweeper" in config.hydra.sweeper["_target_"]:
            raise UsageError(f"{given} is an interval, which only hydra/sweeper=optuna uses. Add hydra/sweeper=optuna.")
        if is_sweep and key == "hydra.run.dir":
            raise UsageError(f"{given} has no effect on a sweep. Use hydra.sweep.dir instead.")
        if not (is_sweep or may_keep) and re.match(r"hydra[./](sweep|sweeper|launcher)\b|sweep$", key):
            raise UsageError(f"{given} has no effect on a single run. Add -m.")


def _check_option(composer: Composer, override: Override) -> None:
    group = override.key_or_group
    if not composer.repository.group_exists(group) or override.is_delete():
        return
    written = list(_sweep(override)) if override.is_sweep_override() else override.value()
    if group == "precision" and isinstance(written, list) and len(written) > 1 and not override.is_sweep_override():
        names = ",".join(map(str, written))
        raise UsageError(f"precision is [{names}], expected one option. To run each of them, use -m precision={names}")
    for option in written if isinstance(written, list) else [written]:
        name = describe(option).strip("'\"")
        if isinstance(option, dict) or composer.repository.config_exists(f"{group}/{name}"):
            continue
        known = composer.repository.get_group_options(group)
        hint = did_you_mean(name, known) or did_you_mean(Path(name).stem, options(group))
        if not hint and group in _REPLACEABLE and re.fullmatch(r"[a-zA-Z_]\w*(\.\w+)+", name):
            hint = f" To use the class {name}: {group}._target_={name}."
        if not hint and group == "recipe" and not Path("conf").is_dir():
            hint = f" There is no folder conf in {Path.cwd()}, so there are only the included ones."
        raise UsageError(f"Config group {group!r} has no option {name!r}.{hint} Choose one of: {', '.join(known)}.")


def _compose(composer: Composer, job: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Return the config of ``job`` with and without its settings, after checking the settings against the latter."""
    before = {}

    def check(config: dict[str, Any]) -> None:
        before.update(config)
        known = {entry.key: entry.value for entry in walk(config, into_lists=False)}
        for override in composer.parse(job):
            _check_key(composer, known, override)

    return composer.compose(job, check), before


def _check_key(composer: Composer, known: dict[str, Any], override: Override) -> None:
    """Refuse a key that does not exist, except below a null value or a list, and keys below an interpolation.

    Args:
        composer: the composer of the config.
        known: values by key in the config without the settings of the command line.
        override: one of these settings.
    """
    key = above = override.key_or_group
    if override.package is not None or "[" in key or key == "hydra.searchpath" or composer.chooses(override):
        return  # Hydra checks packages and list items
    if override.is_delete() and key.startswith("trainer."):
        raise UsageError(f"{key} cannot be removed. Use {key}=null, or set another value.")
    while above and above not in known:
        above = above.rpartition(".")[0]
    node, rest = known.get(above), key.removeprefix(above)
    is_added = override.is_add() or override.is_force_add()
    if rest and isinstance(node, str) and node.startswith("${"):  # Hydra would replace the interpolation by a new node
        plus = "+" if is_added else ""
        raise UsageError(f"{above} is {node}: set {plus}{node.strip('${}')}{rest} instead of {plus}{key}.")
    is_open = above and (node is None or node == "???" or isinstance(node, list))
    if not (is_added or is_open or key in known):
        hint = _nearest(key, known) or did_you_mean(key, composer.groups())
        is_new = not (hint or override.is_delete() or key.startswith("trainer."))
        new = f" To add a new setting, write +{override.input_line}." if is_new else ""
        raise UsageError(f"There is no setting {key!r}.{hint}{new}")


_COMMON = {
    "clip": "trainer.gradient_clip_val",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "learning_rate": "optimizer.lr",
    "num_epochs": "trainer.max_epochs",
    "output_dir": "hydra.run.dir",
    "steps": "trainer.max_steps",
}
"""Settings by their common names in other programs."""


def _nearest(key: str, known: Collection[str]) -> str:
    """Return a hint that suggests a key with the same or the nearest last part, such as ``optimizer.lr`` for ``lr``.

    Keys of the same node are preferred, then those of the upper nodes.
    """
    node, _, last = key.lower().rpartition(".")
    names = [name for name in known if name.startswith("hydra") <= key.startswith("hydra")]
    names.sort(key=lambda name: (name.rpartition(".")[0] == node, -name.count(".")))
    by_last = {name.rpartition(".")[2].lower(): name for name in names}
    by_last |= {common: name for common, name in _COMMON.items() if name in known}
    if last not in by_last and f"{node}._target_" in names:  # the class may have arguments that are not in the config
        by_last = {name: full for name, full in by_last.items() if full.startswith(f"{node}.")}
    matches = difflib.get_close_matches(last, by_last, n=1)
    return f" Did you mean {by_last[matches[0]]!r}?" if matches else ""


def _check_whole(composer: Composer, config: DictConfig, before: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Check the whole config: missing values, model, checkpoint, allowed targets, and settings without effect.

    Args:
        composer: the composer of the config.
        config: the config of a job.
        before: the config without the settings of the command line.
        overrides: the settings of the command line.
    """
    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    runs = not composer.arguments.shows
    if missing := [name for name in _REQUIRED if name not in job]:
        raise UsageError(f"There is no {missing[0]} in the config, expected one: it cannot be removed.")
    if composer.config_name != RESTORED:  # a restored config was checked by its own run
        _check_ignored_keys(composer, config, before)
    with environment(dict(config.hydra.job.env_set)):  # Hydra sets them when the run starts
        plain = resolve(job) if runs else unresolved(job)  # a config that is only shown may be incomplete
    check_settings("", {name: plain.get(name) for name in _ROOT}, _ROOT)
    check_settings("trainer", plain["trainer"], ACCEPTED)
    Allowlist.of(plain).check(plain)
    read_settings(Objective, "objective", plain["objective"])
    read_settings(_CheckpointFiles, "checkpoint_files", plain["checkpoint_files"])
    if runs:
        tracking.check(plain)
        _check_targets(plain)
        _check_start(plain)
        _check_model(plain, composer.arguments, config.hydra.runtime.choices.get("recipe"))
        _check_resumed(plain, overrides)
        _check_used(OmegaConf.to_container(job, resolve=False), overrides)


def _check_hydra(config: DictConfig, *, is_sweep: bool) -> None:
    """Check the settings of Hydra that a run depends on, and register the launcher and the sweeper of a sweep."""
    settings = {"hydra.run.dir": _FOLDER, "hydra.sweep.dir": _FOLDER, "hydra.job.name": _NAME}
    for key, kind in settings.items():
        with resolution_errors():
            problem = mistake(key, str(OmegaConf.select(config, key)), (kind,))
        if problem:
            raise UsageError(problem)
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise UsageError("hydra.job.chdir is true, expected false. The run's folder is ${hydra:runtime.output_dir}.")
    if is_sweep:
        plugins.prepare(config.hydra)


def _check_folder_of_job(config: DictConfig, folders: set[str]) -> None:
    """Refuse a sweep with two jobs in one folder.

    Args:
        config: config of a job.
        folders: folders of the other jobs. That of this job is added.
    """
    written = str(unresolved(config.hydra.sweep)["subdir"])
    if re.search(r"hydra[.:]job\.(num|id)\b", written):  # differs for each job, and is not known yet
        return
    with resolution_errors():
        folder = str(OmegaConf.select(config, "hydra.sweep.subdir"))
    if folder in folders:
        expected = "expected one folder for each job. Add ${hydra:job.num} to it."
        raise UsageError(f"hydra.sweep.subdir is {written}, which is {folder} for several jobs, {expected}")
    folders.add(folder)


def _check_ignored_keys(composer: Composer, config: DictConfig, before: dict[str, Any]) -> None:
    """Refuse keys without an effect: misspelled ones, and those in files without ``@package``."""
    known, choices = unresolved(config), config.hydra.runtime.choices
    for group in GROUPS_TO_ADD:
        if group in known:
            file = f"conf/{group}/{choices.get(group)}.yaml"
            raise UsageError(f"{file} sets only the node {group!r}. Add `# @package _global_` as its first line.")
    groups, text = composer.groups(), f"{before} {known}"  # an override may replace the only interpolation of a key
    keys = [entry.key for entry in walk(known, into_lists=False)]
    for name in known.keys() - {*groups, *OmegaConf.load(packaged_conf() / f"{CONFIG_NAME}.yaml")}:
        is_read = re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", text)
        same = [] if isinstance(known[name], dict) else [key for key in keys if key.endswith(f".{name}")][:1]
        hint = f" Did you mean {same[0]!r}?" if same else did_you_mean(name, groups)
        if hint and not is_read:
            raise UsageError(f"There is no setting {name!r}.{hint}")
    for group in ("callbacks", "logger"):
        entries = known[group] if isinstance(known[group], dict) else {}
        nodes = {name: node for name, node in entries.items() if isinstance(node, dict)}
        names = [
            *composer.repository.get_group_options(group),
            *(name for name, node in nodes.items() if "_target_" in node),
        ]
        for name in nodes:  # a node of an option that was not chosen is allowed
            if name not in names and (hint := did_you_mean(name, names)):
                raise UsageError(f"{group}.{name} has no _target_.{hint}")


def _check_targets(plain: dict[str, Any]) -> None:
    """Check that nodes that become objects are nodes."""
    nodes = {name: plain.get(name) for name in _REPLACEABLE}
    for group in ("callbacks", "logger"):
        entries = plain[group] if isinstance(plain[group], dict) else {"": plain[group]}
        nodes |= {f"{group}.{name}".rstrip("."): node for name, node in entries.items()}
    for key, node in nodes.items():
        has_target = isinstance(node, dict) and ("_target_" in node or key not in ("model", "data"))
        if node is not None and not has_target:
            expected = "expected a node with a _target_, the dotted name of a class, or null."
            raise UsageError(f"{key} is {describe(node)}, {expected} {DEFAULTS_ADVICE}")


def _check_model(plain: dict[str, Any], arguments: Arguments, recipe: str | None) -> None:
    if plain["model"] is not None:
        return
    command, recipes = plain["command"], ", ".join(options("recipe", arguments.flags.get("--config-dir")))
    words = [word for word in arguments.overrides if not word.lstrip("+").startswith("recipe=")]
    evaluates = command in ("validate", "test", "predict")
    run = f" Or choose a run: `{command_line(command, 'ckpt=RUN_FOLDER')}`." if evaluates else ""
    chosen = f" With +recipe={recipe}, model is null." if recipe else ""
    raise UsageError(
        f"There is no model to {'check' if command == 'checks' else command}.{chosen} Choose a recipe,"
        f" `{command_line(arguments.command, *arguments.words, '+recipe=NAME', *words)}`, or a model: model=NAME.{run}"
        f" Recipes: {recipes} (`{command_line('recipes')}` describes them)."
    )


def _check_used(config: Any, overrides: Sequence[Override]) -> None:
    """Refuse an optimizer or scheduler on the command line if no node of the config uses it."""
    for name in ("optimizer", "scheduler"):
        rest = {key: node for key, node in config.items() if key != name}
        given = [override.input_line for override in overrides if override.key_or_group.partition(".")[0] == name]
        if given and config.get(name) is not None and f"${{{name}" not in str(rest):
            advice = f"Remove it, or pass the {name} to the model: `{name}: ${{{name}}}` in its node."
            raise UsageError(f"{given[-1]} has no effect: no node of this recipe uses the {name}. {advice}")


def _check_start(plain: dict[str, Any]) -> None:
    """Check the settings of the initial state: ``ckpt``, ``ckpt_path`` and ``weights``."""
    weights, command, path = plain["weights"], plain["command"], plain["ckpt_path"]
    given = next((f"{name}={plain[name]}" for name in ("ckpt", "ckpt_path") if plain[name] is not None), None)
    if given is not None and command in ("checks", "tune"):
        checkpoint = given.partition("=")[2]
        start = _from_weights(checkpoint, f"{checkpoint}/file")  # also if it is the folder of a run
        raise UsageError(f"Got {given} with {command}, which does not resume. For its weights, replace it by {start}.")
    if weights is not None and command not in ("fit", "compare", "tune", "checks"):
        evaluate = command_line(command, path_override("ckpt", weights))
        raise UsageError(f"Got weights={weights} with {command}, which does not train. Use a run: `{evaluate}`.")
    if weights is not None and given is not None:
        raise UsageError(f"Got weights={weights} and {given}, expected one of them: weights begins a new run.")
    if weights is not None:
        find_weights(weights)
    if path is None or path in _NAMED_CHECKPOINTS or "://" in path or path.startswith("registry"):
        return
    if Path(path).is_dir() and not is_checkpoint_folder(Path(path)):
        raise UsageError(f"ckpt_path is {path}, which is a folder, expected a checkpoint. For a run, use ckpt=FOLDER.")
    find(Path(path), key="ckpt_path")


def _check_resumed(plain: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Refuse settings of the optimizer on the command line that a checkpoint of a fit replaces."""
    given = {override.key_or_group: override for override in overrides}
    folder = str(given["hydra.run.dir"].value()) if "hydra.run.dir" in given else ""
    checkpoints = checkpoints_in(Path(folder)) if folder and plain["trainer"]["resume"] == "auto" else []
    path = str(checkpoints[0]) if checkpoints else plain["ckpt_path"]  # resume=auto prefers those of its folder
    run = run_of(Path(path)) if plain["command"] == "fit" and path is not None and Path(path).exists() else None
    if run is None:
        return
    saved: Any = None
    now = plain.get("optimizer")
    node = OmegaConf.create(saved_config(run)).get("optimizer")
    with suppress(OmegaConfBaseException):  # such as an environment variable that is not set any more
        saved = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else None
    if not isinstance(saved, dict) or not isinstance(now, dict) or saved.get("_target_") != now.get("_target_"):
        return
    for name, before in saved.items():
        # values that are not given may be those of a recipe
        is_given = plain["ckpt"] is not None or checkpoints or f"optimizer.{name}" in given
        if is_given and name not in _NOT_RESTORED and before != now.get(name):
            raise UsageError(
                f"optimizer.{name}={describe(now.get(name))} has no effect, because the optimizer in {path} continues"
                f" with {name}={describe(before)}. Remove it, or start a new run from the weights: replace"
                f" {'resume=auto and its folder' if checkpoints else 'the checkpoint'} by {_from_weights(path, path)}."
            )


def _from_weights(weights: str, checkpoint: str) -> str:
    """Return the settings that start a new run from ``weights``, with the recipe of the run of ``checkpoint``."""
    return f"+recipe={recipe_of(checkpoint) or 'NAME'} {shlex.quote(path_override('weights', weights))}"
