"""``ckpt=RUN``: run a command on a checkpoint with the config of the run that wrote it. Imports no torch.

The config is the composed one (``.hydra/config.yaml`` in the run's folder). It is not composed again from the run's
overrides, because recipes change or may be missing. It becomes an in-memory primary config of Hydra, so that overrides,
options of config groups, sweeps and all checks work as usual. Groups for which the command line chooses an option are
removed from it, and the chosen options are merged after it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore

from trainer.cli.compose import CONFIG_NAME, RESTORED, Composer
from trainer.cli.failure import printable
from trainer.cli.folders import packaged_conf
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.processes import is_first
from trainer.cli.workdir import path_override, quoted
from trainer.common.terminal import command_line, inform
from trainer.record.find_checkpoint import CONFIG, find, run_of
from trainer.record.run_record import load_run

_OPTION = re.compile(r"\w[\w./-]*")
"""The names of options that are read from the folder of a run, which may be from another person."""
_RECIPE = "${oc.select:hydra.runtime.choices.recipe,unnamed}"
"""The recipe in the default folder of a run."""
_COMMAND_GROUPS = ("checks", "compare", "tune")
"""Groups with the settings of a command."""
_NOT_RESTORED = ("allowed_packages", "defaults", "hydra", "ckpt", "ckpt_path", "weights", "resume", *_COMMAND_GROUPS)
"""Keys of a saved config that are ignored."""


def apply(arguments: Arguments) -> None:
    """If ``arguments`` contain ``ckpt=``, replace the default config by the config of that run.

    Raises:
        UsageError: if the checkpoint does not exist, no config belongs to it, the config cannot be read, or the command
            line chooses another config.
    """
    given = [word for word in arguments.overrides if word.lstrip("+").startswith("ckpt=")]
    given_ckpt = given[-1].partition("=")[2].strip("'\" ") if given else "null"
    if given_ckpt == "null":  # the default
        return
    if not given_ckpt:
        raise UsageError("ckpt is empty, expected a checkpoint, or the folder of a run. A shell variable may be unset.")
    _refuse_contradictions(arguments, given_ckpt)
    checkpoint = find(Path(given_ckpt).expanduser(), latest=arguments.command == "fit")
    run = run_of(checkpoint)
    if run is None:
        command = command_line(arguments.command, "+recipe=NAME", path_override("ckpt_path", checkpoint))
        reason = f"there is no {CONFIG} in the folders above it"
        raise UsageError(
            f"ckpt is {given_ckpt}, expected the folder of a run: {reason}. Choose its config: `{command}`"
        )
    arguments.overrides = [word for word in arguments.overrides if word not in given]
    node = _config(run, checkpoint, _chosen(arguments))
    store = ConfigStore.instance()
    store.repo.pop(f"{RESTORED}.yaml", None)  # of an earlier command in this process
    store.store(name=RESTORED, node=node, provider="run")
    arguments.overrides.append(f"ckpt={quoted(str(checkpoint))}")  # so that other processes use the same checkpoint
    arguments.flags["--config-name"] = RESTORED
    if is_first() and not arguments.shows:
        inform(printable(f"{arguments.command} with {checkpoint.name} and the config of {run}."))


def recipe_of(checkpoint: str | None) -> str | None:
    """Return the recipe of the run that wrote ``checkpoint``, or None if it is unknown."""
    run = None if checkpoint is None else run_of(Path(checkpoint))
    recipe = None if run is None else load_run(run).recipe
    return recipe if recipe is not None and _OPTION.fullmatch(recipe) else None


def _refuse_contradictions(arguments: Arguments, given_ckpt: str) -> None:
    if arguments.command == "compare":
        raise UsageError("Got ckpt with compare, which trains from the beginning. Remove ckpt.")
    keys = {word.lstrip("+~").partition("=")[0] for word in arguments.overrides}
    has_config = arguments.flags.get("--config-name", RESTORED) != RESTORED
    if has_config or not keys.isdisjoint(("recipe", "ckpt_path")):
        problem = f"Got ckpt={given_ckpt}, which uses the config of its run, and a recipe, another config or ckpt_path."
        raise UsageError(f"{problem} Remove them, or use ckpt_path=FILE for another config instead of ckpt.")


def _chosen(arguments: Arguments) -> dict[str, str]:
    """Return the options on the command line, by ``GROUP`` or ``GROUP@PACKAGE``; of a sweep, the first ones."""
    composer = Composer(arguments)
    chosen = {}
    for override in composer.parse(arguments.overrides):
        group = override.get_key_element()
        if composer.chooses(override) and not (override.is_add() or override.is_delete() or group.startswith("hydra")):
            values = override.sweep_string_iterator() if override.is_sweep_override() else iter([str(override.value())])
            chosen[group] = next(values)
    return chosen


def _config(run: Path, checkpoint: Path, groups: dict[str, str]) -> dict[str, Any]:
    """Return the primary config: the default config, updated by the config of the run, then options of ``groups``."""
    base = yaml.safe_load((packaged_conf() / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    del base["defaults"]
    saved = {name: value for name, value in saved_config(run).items() if name not in _NOT_RESTORED}
    for group in (*groups, "callbacks/pruning"):  # the run is not a trial of this command's study
        _remove(saved, group)
        _remove(base, group)
    job, choices = _saved_hydra(run, "job"), _saved_hydra(run, "runtime").get("choices")
    numbers = {"num": int, "id": str}
    base["hydra"]["job"] |= {name: job[name] for name, cls in numbers.items() if isinstance(job.get(name), cls)}
    options = {
        str(group): option
        for group, option in (choices.items() if isinstance(choices, dict) else ())
        if _OPTION.fullmatch(str(option)) and group not in ("recipe", *groups) and not str(group).startswith("hydra/")
    }
    recipe = recipe_of(str(checkpoint))
    if recipe is not None:
        options["recipe"] = recipe
        for section in (base["hydra"]["run"], base["hydra"]["sweep"]):
            section["dir"] = section["dir"].replace(_RECIPE, recipe.replace("/", "_"))
    base["hydra"]["runtime"] = {"choices": options}
    chosen = {**dict.fromkeys(_COMMAND_GROUPS, "default"), **groups}
    chosen |= {"override hydra/job_logging": "trainer", "override hydra/hydra_logging": "none"}
    defaults = ["_schema/trainer@trainer", "_self_", *({group: option} for group, option in chosen.items())]
    return {"defaults": defaults, **base, **saved, "ckpt_path": str(checkpoint)}


def _remove(config: dict[str, Any], group: str) -> None:
    """Remove the node of ``GROUP`` or ``GROUP@PACKAGE`` from a config, if it has one."""
    *parents, name = (group.partition("@")[2] or group.replace("/", ".")).split(".")
    node: Any = config
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(name, None)


def saved_config(run: Path) -> dict[str, Any]:
    """Return the unresolved config of the run in a folder.

    Raises:
        UsageError: if its file is damaged.
    """
    file = run / CONFIG
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(saved["trainer"], dict) or "model" not in saved:
            raise ValueError
    except (OSError, LookupError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        advice = "To use the checkpoint anyway, choose its config: +recipe=NAME ckpt_path=FILE instead of ckpt."
        raise UsageError(f"{file} is damaged, expected YAML with the settings of a run. {advice}") from error
    return {str(name): value for name, value in saved.items()}


def _saved_hydra(run: Path, name: str) -> dict[str, Any]:
    """Return a node of Hydra's config of the run in a folder; {} if it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        node = yaml.safe_load((run / ".hydra" / "hydra.yaml").read_text(encoding="utf-8"))["hydra"][name]
        return node if isinstance(node, dict) else {}
    return {}
