"""Check a command line before anything expensive is imported. Errors suggest the nearest valid name."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.arguments import SWITCH, WHOLE, Kind, describe, join_alternatives
from trainer.cli import plugins, tracking
from trainer.cli.arguments import GROUPS_TO_ADD, Arguments, UsageError, canonical_precisions
from trainer.cli.compose import (
    ADVICE_ON_DEFAULTS,
    CONFIG_NAME,
    RESTORED,
    Composer,
    resolution_errors,
    resolve,
    unresolved,
)
from trainer.cli.folders import packaged_conf
from trainer.cli.keys import options
from trainer.cli.objective import Objective
from trainer.cli.processes import environment
from trainer.cli.restore import recipe_of, saved_config
from trainer.cli.schema import (
    SETTINGS,
    accepted_by_default,
    as_number,
    check_trainer,
    mistake,
    read_settings,
    setting,
)
from trainer.cli.targets import Allowlist
from trainer.cli.walk import walk
from trainer.cli.workdir import path_override, quoted, sweeps
from trainer.errors import did_you_mean
from trainer.record.find_checkpoint import checkpoints_in, find, find_weights, is_checkpoint_folder, run_of
from trainer.terminal import command_line

_MOST_JOBS = 50
"""Largest number of jobs of a sweep that are composed and checked before the first one starts, at 0.1 s per job."""
_REQUIRED_NODES = (
    "allowed_packages", "callbacks", "checkpoint_files", "checks", "compare", "logger", "objective", "seed", "tune",
)  # fmt: skip
_REPLACEABLE = ("data", "model", "optimizer", "scheduler")
"""Config groups with options that each configure one class."""
_REQUIRED_GROUPS = ("precision", "trainer")
"""Config groups that cannot be removed."""
_NAMED_CHECKPOINTS = ("last", "best", "hpc")
_NOT_RESTORED = ("_partial_", "_target_", "capturable", "foreach", "fused")
"""Settings of an optimizer that a checkpoint does not replace, or that raise an error if they differ."""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


_ROOT = {
    "seed": (WHOLE.at_least(0)._replace(most=2**32 - 1), None),
    "ckpt_path": (Kind("the path or URL of a file, best, last", _is_path), None),
    "weights": (Kind("the folder of a run, a checkpoint, a state dict, a .safetensors file", _is_path), None),
    **{name: SETTINGS[name].accepts for name in ("resume", "exact_resume")},
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
        overrides = [*_sweeper_params(arguments, composer, config), *overrides]
    _check_several_values(overrides, config, is_sweep=is_sweep)
    jobs = list(islice(_jobs(overrides), _MOST_JOBS))
    composed = [_compose(composer, job) if job != first else (config, before) for job in jobs]
    if arguments.command == "compare":
        from trainer.cli import compare  # imported here because it is slow

        compare.check(config, jobs=math.prod(len(values) for values in _values(overrides)))
    folders: set[str] = set()
    for config, before in composed:
        HydraConfig.instance().set_config(config)  # for ${hydra:...}
        if config is composed[0][0]:
            _check_hydra(config)
            if not arguments.shows:
                _check_mode(overrides, is_sweep=is_sweep)
            if is_sweep:
                plugins.prepare(config.hydra)
        if is_sweep:
            _check_folder_of_job(config, folders)
        _check_whole(composer, config, before, overrides, arguments)
    HydraConfig.instance().set_config(composed[0][0])
    return composed[0][0]


def _values(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the values of each override, as overrides without a sweep."""
    found = []
    for override in overrides:
        values = [str(override.input_line)]
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in islice(_sweep(override), _MOST_JOBS)]
        if not values:
            raise UsageError(f"{override.input_line} has no values, expected at least one.")
        found.append(values)
    return found


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


def _sweeper_params(arguments: Arguments, composer: Composer, config: DictConfig) -> list[Override]:
    """Return the overrides in ``hydra.sweeper.params`` (set in conf/sweep), with full names of precisions."""
    params = dict(OmegaConf.select(config, "hydra.sweeper.params") or {})
    if "precision" in params and (known := canonical_precisions(str(params["precision"]))) != params["precision"]:
        params["precision"] = known
        arguments.overrides.append(f"hydra.sweeper.params.precision={quoted(known)}")
    overrides = composer.parse([f"{key}={value}" for key, value in params.items()])
    for override in overrides:
        _check_option(composer, override)
    return overrides


def _check_several_values(overrides: Sequence[Override], config: DictConfig, *, is_sweep: bool) -> None:
    """Refuse several values without ``-m``, and intervals without a sweeper that can sample from them."""
    has_search = "BasicSweeper" not in config.hydra.sweeper["_target_"]
    for override in overrides:
        if override.is_sweep_override() and not is_sweep:
            raise UsageError(
                f"{override.input_line} has several values, expected one. To run one job for each value, add -m. If it"
                " is a single value, quote it; if it is a list, put it in brackets."
            )
        if override.is_interval_sweep() and not has_search:
            raise UsageError(
                f"{override.input_line} is an interval, which only hydra/sweeper=optuna can sample from. Add"
                " hydra/sweeper=optuna, or list the values."
            )


def _check_option(composer: Composer, override: Override) -> None:
    group = override.key_or_group
    if not composer.is_group(group) or override.is_delete():
        return
    if override.is_interval_sweep():
        raise UsageError(f"{override.input_line} is an interval, expected options of the config group {group}.")
    written = list(_sweep(override)) if override.is_sweep_override() else override.value()
    if group == "precision" and isinstance(written, list) and len(written) > 1 and not override.is_sweep_override():
        names = ",".join(map(str, written))
        raise UsageError(f"precision is [{names}], expected one option. To run each of them, use -m precision={names}")
    for option in written if isinstance(written, list) else [written]:
        if isinstance(option, dict):
            continue
        if option is None or option is False:
            known = composer.options(group)
            option_none = f"{group}=none" if "none" in known else f"~{group}"
            removal = "" if group in _REQUIRED_GROUPS else f" To use none, write {option_none}."
            raise UsageError(f"{group} is {describe(option)}, expected one of: {', '.join(known)}.{removal}")
        name = str(option).strip("'\"")
        if not composer.has_option(group, name):
            known = composer.options(group)
            short = [f"fp{one.partition('-')[0]}" for one in known] if group == "precision" else []
            hint = _hint_other_file(group, name, known) or did_you_mean(name, [*known, *short])
            raise UsageError(f"Config group {group!r} has no option {name!r}.{hint} Choose one of: {', '.join(known)}.")


def _hint_other_file(group: str, name: str, known: Sequence[str]) -> str:
    """Return a hint if the option is written as a path or a class, or its file is not one of the configs; else ""."""
    stem = Path(name).name.removesuffix(".yml").removesuffix(".yaml")
    files = (Path("conf", group, f"{stem}.yml"), Path("conf", f"{stem}.yaml"))
    inside = [option for option in options(group) if option.endswith(f"/{name}")]
    if inside or (stem != name and stem in known):
        return f" Did you mean {(inside or [stem])[0]!r}?"
    if found := next((file for file in files if file.is_file()), None):
        return f" The name of {found} has to be conf/{group}/{stem}.yaml."
    if group in _REPLACEABLE and re.fullmatch(r"[a-zA-Z_]\w*(\.\w+)+", name):
        return f" To use the class {name}: {group}._target_={name}."
    if group == "recipe" and not Path("conf").is_dir():
        return f" There is no folder conf in {Path.cwd()}, so there are only the included ones."
    return ""


def _compose(composer: Composer, job: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Return the config of ``job`` with and without its settings, after checking the settings against the latter."""
    before = {}

    def check(config: dict[str, Any], chosen: dict[str, str]) -> None:
        before.update(config)
        known = {entry.key: entry.value for entry in walk(config, into_lists=False)}
        _check_settings(composer, known, chosen, job)
        _check_replaced_options(composer, known, job)

    return composer.compose(job, check), before


def _check_settings(composer: Composer, known: dict[str, Any], chosen: dict[str, str], job: Sequence[str]) -> None:
    """Check the settings in ``job`` against the config without them.

    Args:
        composer: parses the settings.
        known: values by key in the config without the settings.
        chosen: chosen option by config group.
        job: overrides of one job.
    """
    for override in composer.parse(job):
        key = override.key_or_group
        if override.package is not None or "[" in key or key == "hydra.searchpath" or composer.chooses(override):
            continue  # Hydra checks packages and list items
        if override.is_delete() and key.startswith("trainer."):
            raise UsageError(f"{key} cannot be removed. Use {key}=null, or set another value.")
        if override.is_add() or override.is_force_add():
            _check_new_key(composer, known, override)
        elif key not in known:
            _check_unknown_key(known, chosen, override, composer)
        elif not override.is_delete():
            _check_value(key, override.value(), known[key])


def _check_replaced_options(composer: Composer, known: dict[str, Any], job: Sequence[str]) -> None:
    """Raise if the command line replaces an option, and a recipe sets keys that the new option does not have.

    Args:
        composer: reads the options.
        known: values by key in the config before settings of ``job`` change it.
        job: overrides of one job.
    """
    overrides = composer.parse(job)
    given = {override.key_or_group for override in overrides}
    for override in overrides:
        group, option = override.key_or_group, str(override.value()).strip("'\"")
        if group not in _REPLACEABLE or override.package or not composer.chooses(override) or override.is_delete():
            continue  # with a package, such as optimizer@second, it is the option of another node
        others = [str(one.input_line) for one in overrides if one is not override]
        files = composer.files(others)
        former = [file.stem for file, of_group, package in files if (of_group, package) == (group, group)][-1:]
        own = composer.option(group, option)
        left = [f"{group}.{name}" for name in known.get(group) or () if own and name not in own]
        left = [key for key in left if key not in given and former not in ([], [option])]
        if left:
            raise UsageError(
                f"{group}={option} replaces {group}={former[0]}, but the config keeps settings for the latter, which"
                f" {option} does not have: {', '.join(left)}. To remove them: {' '.join(f'~{key}' for key in left)}"
            )


def _setting(key: str) -> str | None:
    """Return ``NAME`` if the key is ``trainer.NAME``; None for other keys and ``trainer._target_``."""
    node, _, name = key.partition(".")
    return name if node == "trainer" and name not in ("", "_target_") and "." not in name else None


def _check_new_key(composer: Composer, known: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    _existing_part(known, override)
    name = _setting(key)
    if name is not None and name not in SETTINGS:
        hint = did_you_mean(name, SETTINGS).replace("'", "'trainer.", 1) or _nearest(key, known)
        raise UsageError(f"The Trainer has no argument {key!r}.{hint}")
    if key in known and not override.is_force_add() and not isinstance(override.value(), dict):
        plain = str(override.input_line).lstrip("+")
        raise UsageError(f"{key} is in the config already. Remove the + before it: {plain}")
    group_hint = did_you_mean(key, [group for group in composer.groups() if group != key])
    if "." not in key and group_hint and not override.is_force_add():
        raise UsageError(
            f"There is no config group {key!r}.{group_hint} To add a setting of that name, write"
            f" ++{str(override.input_line).lstrip('+')}."
        )


def _check_unknown_key(known: dict[str, Any], chosen: dict[str, str], override: Override, composer: Composer) -> None:
    """Refuse a key that does not exist. A key under a null value or a list is not checked."""
    key = override.key_or_group
    above = _existing_part(known, override)
    node = known.get(above)
    if above and (node is None or node == "???" or isinstance(node, list)):
        return
    groups = [group for group in composer.groups() if not key.startswith(f"{group}.")]
    hint = _hint_other_options(chosen, key, composer) or _nearest(key, known) or did_you_mean(key, groups)
    is_new = not hint and not override.is_delete() and not key.startswith("trainer.")
    new = f" To add a new setting, write +{override.input_line}." if is_new else ""
    raise UsageError(f"There is no setting {key!r}.{hint}{new}")


def _existing_part(known: dict[str, Any], override: Override) -> str:
    """Return the longest part of an override's key that exists. Refuse keys below an interpolation."""
    key = above = override.key_or_group
    while above and above not in known:
        above = above.rpartition(".")[0]
    node, rest = known.get(above), key.removeprefix(above)
    if rest and isinstance(node, str) and node.startswith("${"):  # Hydra would replace the interpolation by a new node
        plus = "+" if override.is_add() or override.is_force_add() else ""
        raise UsageError(f"{above} is {node}: set {plus}{node.strip('${}')}{rest} instead of {plus}{key}.")
    return above


def _hint_other_options(options: dict[str, str], key: str, composer: Composer) -> str:
    """Return a hint if other options of the group have the setting, for example ``fp32_modules`` of 16-mixed."""
    group, _, name = key.rpartition(".")
    chosen = options.get(group)
    others = ("", "callbacks", "data", "logger", "trainer")  # groups of unrelated options
    if group in others or not composer.is_group(group) or chosen is None:
        return ""
    candidates = [f"{group}={option}" for option in composer.options(group) if name in composer.option(group, option)]
    owners = join_alternatives(candidates)
    return f" It belongs to {owners}, but the config uses {group}={chosen}." if owners else ""


_COMMON = {
    "batch_size": "data.batch_size",
    "clip": "trainer.gradient_clip_val",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "learning_rate": "optimizer.lr",
    "num_epochs": "trainer.max_epochs",
    "output_dir": "hydra.run.dir",
    "steps": "trainer.max_steps",
    "workers": "data.num_workers",
}
"""Settings by their common names in other programs."""


def _nearest(key: str, known: Collection[str]) -> str:
    """Return a hint that suggests a key with the same or the nearest last part, such as ``optimizer.lr`` for ``lr``.

    Keys of the same node are preferred, then those of the upper nodes.
    """
    node, _, last = key.lower().rpartition(".")
    names = [name for name in known if name.startswith("hydra") <= key.startswith("hydra") and f"{name}." not in key]
    names.sort(key=lambda name: (name.rpartition(".")[0] == node, -name.count(".")))
    by_last = {name.rpartition(".")[2].lower(): name for name in names}
    by_last |= {common: name for common, name in _COMMON.items() if name in known}
    if last not in by_last and f"{node}._target_" in names:  # the class may have arguments that are not in the config
        by_last = {name: full for name, full in by_last.items() if full.startswith(f"{node}.")}
    matches = difflib.get_close_matches(last, by_last, n=1)
    return f" Did you mean {by_last[matches[0]]!r}?" if matches else ""


def _check_value(key: str, value: Any, default: Any) -> None:
    """Check that a setting has a value of the same kind as its default."""
    is_text = isinstance(value, str) and (value.startswith("${") or bool(as_number(value)))
    if name := _setting(key):  # the schema converts text to numbers
        problem = None if is_text else SETTINGS[name].mistake(value, key)
    elif value is None or key.startswith("hydra.") or str(value).startswith("${"):
        return
    elif value != value and not key.startswith(("optimizer.", "scheduler.")):
        return  # NaN may stand for a missing value
    else:
        problem = mistake(key, value, accepted_by_default(default))
    if problem and isinstance(value, list):
        problem += f" To run one job for each value, write them without brackets: -m {key}={','.join(map(str, value))}"
    if problem:
        raise UsageError(problem)


def _check_whole(
    composer: Composer,
    config: DictConfig,
    before: dict[str, Any],
    overrides: Sequence[Override],
    arguments: Arguments,
) -> None:
    """Check the whole config: missing values, model, checkpoint, allowed targets, and settings without effect.

    Args:
        composer: the composer of the config.
        config: the config of a job.
        before: the config without the settings of the command line.
        overrides: the settings of the command line.
        arguments: the command line.
    """
    runs, job = not arguments.shows, OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    _check_complete(job)
    if composer.config_name != RESTORED:  # a restored config was checked by its own run
        _check_ignored_keys(composer, config, before, overrides)
    for key, accepts in _ROOT.items():
        if (problem := mistake(key, value := job.get(key), accepts)) and not str(value).startswith("${"):
            raise UsageError(problem)
    with environment(dict(config.hydra.job.env_set)):  # Hydra sets them when the run starts
        plain = resolve(job) if runs else unresolved(job)  # a config that is only shown may be incomplete
    check_trainer(plain["trainer"])
    Allowlist.of(plain).check(plain)
    read_settings(Objective, "objective", plain["objective"])
    read_settings(_CheckpointFiles, "checkpoint_files", plain["checkpoint_files"])
    if runs:
        tracking.check(plain)
        _check_no_checkpoint(plain)
        _check_model(plain, arguments, config.hydra.runtime.choices.get("recipe"))
        _check_checkpoint(plain["ckpt_path"])
        _check_weights(plain)
        _check_resumed(plain, overrides)
        _check_used(OmegaConf.to_container(job, resolve=False), overrides)


def _check_hydra(config: DictConfig) -> None:
    """Check the settings of Hydra that a run depends on."""
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        with resolution_errors():
            folder = str(OmegaConf.select(config, key))
        if not _is_path(folder):
            raise UsageError(f"{key} is {describe(folder)}, expected a folder for the run, such as outputs/NAME.")
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise UsageError(
            "hydra.job.chdir is true, expected false: modules and paths are relative to the working directory of the"
            " command. The folder of the run is ${hydra:runtime.output_dir}."
        )
    if not _is_path(name := str(OmegaConf.select(config, "hydra.job.name"))) or re.search(r"[/\\]", name):
        raise UsageError(
            f"hydra.job.name is {describe(name)}, expected a name without slashes, because files are named after it."
        )


def _check_mode(overrides: Sequence[Override], *, is_sweep: bool) -> None:
    """Refuse settings of Hydra on the command line that have no effect in a single run, or in a sweep.

    A job of a sweep, which has ``hydra.mode=RUN``, may keep the settings of the sweep.
    """
    has_mode = any(override.key_or_group == "hydra.mode" for override in overrides)
    for override in overrides:
        key = override.key_or_group
        if is_sweep and key == "hydra.run.dir":
            raise UsageError(f"{override.input_line} has no effect on a sweep. Use hydra.sweep.dir instead.")
        if not (is_sweep or has_mode) and re.match(r"hydra[./](sweep|sweeper|launcher)\b|sweep$", key):
            instead = " Use hydra.run.dir instead, or add -m." if key == "hydra.sweep.dir" else " Add -m."
            raise UsageError(f"{override.input_line} has no effect on a single run.{instead}")


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
        raise UsageError(
            f"hydra.sweep.subdir is {written}, which is {folder} for several jobs, expected another folder for each"
            " job. Add ${hydra:job.num} to it."
        )
    folders.add(folder)


def _check_complete(job: DictConfig) -> None:
    """Check that all required nodes exist, because Hydra can delete them."""
    for name in (*_REQUIRED_NODES, *_REQUIRED_GROUPS):
        if name not in job:
            hint = f" To use none, write {name}=none." if name in ("callbacks", "logger") else ""
            raise UsageError(f"There is no {name} in the config, expected one: it cannot be removed.{hint}")
    for name in ("callbacks", "logger"):
        group = unresolved(job)[name]
        group = {} if group is None else group
        for key, node in group.items() if isinstance(group, dict) else [("", group)]:
            if node is not None and not isinstance(node, dict) and not str(node).startswith("${"):
                place = f"{name}.{key}".rstrip(".")
                advice = "" if key else f" {ADVICE_ON_DEFAULTS}"
                raise UsageError(f"{place} is {describe(node)}, expected a node with a _target_, or null.{advice}")


def _check_ignored_keys(
    composer: Composer, config: DictConfig, before: dict[str, Any], overrides: Sequence[Override]
) -> None:
    """Refuse keys without an effect in config files: misspelled ones, and those in files without ``@package``."""
    known = unresolved(config)
    for group in GROUPS_TO_ADD:
        if group in known:
            raise UsageError(
                f"conf/{group}/{config.hydra.runtime.choices.get(group)}.yaml has no effect, because its settings are"
                f" merged into the node {group!r}. Add `# @package _global_` as its first line."
            )
    groups, text = composer.groups(), f"{before} {known}"  # an override may replace the only interpolation of a key
    known_keys = {*groups, *OmegaConf.load(packaged_conf() / f"{CONFIG_NAME}.yaml")}
    keys = {entry.key for entry in walk(known, into_lists=False)}
    meant = {override.key_or_group.partition(".")[0] for override in overrides if override.is_force_add()}
    for name, value in known.items():
        is_read = name in known_keys or re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", text)
        if not is_read and name not in meant:
            same_end = [key for key in keys if key.endswith(f".{name}")]
            same = f" Did you mean {' or '.join(map(repr, same_end))}?" if 0 < len(same_end) <= 3 else ""
            hint = did_you_mean(name, groups) if isinstance(value, dict) else same
            hint = f" Did you mean 'trainer.{name}'?" if name in SETTINGS else hint
            if hint:
                raise UsageError(f"There is no setting {name!r}.{hint}")
    for group in ("callbacks", "logger"):
        entries = known.get(group)
        if not isinstance(entries, dict):  # an interpolation is checked with the whole config
            continue
        nodes = {name: node for name, node in entries.items() if isinstance(node, dict)}
        names = [*composer.options(group), *(name for name, node in nodes.items() if "_target_" in node)]
        for name in nodes:  # a node of an option that was not chosen is allowed
            if name not in names and (hint := did_you_mean(name, names)):
                raise UsageError(f"{group}.{name} has no _target_.{hint}")


def _check_model(plain: dict[str, Any], arguments: Arguments, recipe: str | None) -> None:
    for name in _REPLACEABLE:
        node = plain.get(name)
        is_one_class = name in ("model", "data")  # a GAN may have a node of optimizers
        if node is None or (isinstance(node, dict) and ("_target_" in node or not is_one_class)):
            continue
        raise UsageError(
            f"{name} is {describe(node)}, expected a node with a _target_, the dotted name of a class, such as"
            f" `_target_: my_module.My{name.capitalize()}`. {ADVICE_ON_DEFAULTS}"
        )
    if plain["model"] is not None:
        return
    command, recipes = plain["command"], ", ".join(options("recipe", arguments.flags.get("--config-dir")))
    words = [word for word in arguments.overrides if not word.lstrip("+").startswith("recipe=")]
    evaluates = command in ("validate", "test", "predict")
    run = f" Or choose a run: `{command_line(command, 'ckpt=RUN_FOLDER')}`." if evaluates else ""
    chosen = f" With +recipe={recipe}, model is null." if recipe else ""
    if plain["weights"] is not None:
        chosen += f" weights={plain['weights']} loads only weights, not the config."
    raise UsageError(
        f"There is no model to {'check' if command == 'checks' else command}.{chosen} Choose a recipe,"
        f" `{command_line(arguments.command, *arguments.words, '+recipe=NAME', *words)}`, or a model: model=NAME.{run}"
        f" Recipes: {recipes or 'none, put one into conf/recipe/'} (`{command_line('recipes')}` describes them)."
    )


def _check_used(config: Any, overrides: Sequence[Override]) -> None:
    """Refuse an optimizer or scheduler on the command line if no node of the config uses it."""
    for name in ("optimizer", "scheduler"):
        rest = {key: node for key, node in config.items() if key != name}
        given = [override.input_line for override in overrides if override.key_or_group.partition(".")[0] == name]
        if given and config.get(name) is not None and f"${{{name}" not in str(rest):
            raise UsageError(
                f"{given[-1]} has no effect: no node of this recipe uses the {name} of the config. Remove it, or pass"
                f" the {name} to the model: `{name}: ${{{name}}}` in its node."
            )


def _check_checkpoint(path: str | None) -> None:
    if path is None or path in _NAMED_CHECKPOINTS or "://" in path or path.startswith("registry"):
        return
    if Path(path).is_dir() and not is_checkpoint_folder(Path(path)):
        raise UsageError(
            f"ckpt_path is {path}, which is a folder, expected a checkpoint. To use the folder of a run with its"
            " config, use ckpt=FOLDER."
        )
    find(Path(path), key="ckpt_path")


def _check_no_checkpoint(plain: dict[str, Any]) -> None:
    """Refuse a checkpoint if the command trains from new weights."""
    given = next((f"{name}={plain[name]}" for name in ("ckpt", "ckpt_path") if plain[name] is not None), None)
    if given is None or plain["command"] not in ("checks", "tune"):
        return
    checkpoint = given.partition("=")[2]
    recipe = recipe_of(f"{checkpoint}/file") or "NAME"  # also if it is the folder of a run
    raise UsageError(
        f"Got {given} with {plain['command']}, which does not resume. To start from the weights of a run, replace it by"
        f" +recipe={recipe} {shlex.quote(path_override('weights', checkpoint))}."
    )


def _check_resumed(plain: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Refuse settings of the optimizer on the command line that a checkpoint of a fit replaces."""
    path = plain["ckpt_path"]
    folder = next((str(one.value()) for one in overrides if one.key_or_group == "hydra.run.dir"), "")
    own = checkpoints_in(Path(folder)) if folder and plain["trainer"]["resume"] == "auto" else []
    path = str(own[0]) if own else path  # resume=auto prefers those of its folder
    run = run_of(Path(path)) if plain["command"] == "fit" and path is not None and Path(path).exists() else None
    saved, now = {} if run is None else _saved_optimizer(run), plain.get("optimizer")
    if not isinstance(now, dict) or saved.get("_target_") != now.get("_target_"):
        return
    given = {override.key_or_group for override in overrides}
    for name, before in saved.items():
        # values that are not given may be those of a recipe
        is_given = plain["ckpt"] is not None or own or f"optimizer.{name}" in given
        if is_given and name not in _NOT_RESTORED and before != now.get(name):
            raise UsageError(
                f"optimizer.{name}={describe(now.get(name))} has no effect, because the optimizer in {path} continues"
                f" with {name}={describe(before)}. Remove it, or start a new run from the weights: replace"
                f" {'resume=auto and its folder' if own else 'the checkpoint'} by +recipe={recipe_of(path) or 'NAME'}"
                f" {shlex.quote(path_override('weights', path))}."
            )


def _saved_optimizer(run: Path) -> dict[str, Any]:
    """Return the settings of the optimizer of the run in a folder; {} if it has none, or they cannot be resolved."""
    config = OmegaConf.create(saved_config(run))
    try:
        saved = OmegaConf.to_container(config.optimizer, resolve=True) if "optimizer" in config else None
    except OmegaConfBaseException:  # such as an environment variable that is not set any more
        return {}
    return {str(name): value for name, value in saved.items()} if isinstance(saved, dict) else {}


def _check_weights(plain: dict[str, Any]) -> None:
    """Check the setting ``weights``, which initializes training."""
    weights, command, checkpoint = plain["weights"], plain["command"], plain["ckpt_path"]
    if weights is None:
        return
    if command not in ("fit", "compare", "tune", "checks"):
        raise UsageError(
            f"Got weights={weights} with {command}, expected a command that trains, because weights initializes"
            f" training. To use the weights of a run: `{command_line(command, path_override('ckpt', weights))}`; with"
            " another config: +recipe=NAME ckpt_path=FILE."
        )
    if checkpoint is not None:
        raise UsageError(
            f"Got weights={weights} and {'ckpt' if plain['ckpt'] else 'ckpt_path'}={checkpoint}, expected one of them:"
            " a checkpoint resumes a run with its optimizers and counters, whereas weights initializes a new run."
        )
    find_weights(weights)
