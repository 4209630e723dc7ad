"""``ckpt=RUN``: a command for a checkpoint, with the config of the run that wrote it. Imports no torch.

The config is taken as it was composed (``.hydra/config.yaml`` in the run's folder), not composed again from the run's
overrides: recipes change, and may be missing where the command is run. It becomes a primary config of Hydra's, held in
memory, so that overrides, other options of a group and sweeps work as ever, and it passes the checks that every config
does. Groups that the command line chooses an option of are left out of it and listed behind it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.compose import CONFIG_NAME, RESTORED, Composer
from trainer.cli.failure import printable
from trainer.cli.folders import packaged_conf
from trainer.cli.processes import is_first
from trainer.cli.workdir import quoted
from trainer.files import from_here
from trainer.record.find_checkpoint import find
from trainer.record.run_record import load_run
from trainer.terminal import is_quiet

_CONFIG = Path(".hydra", "config.yaml")
_DEEPEST = 4
"""Folders that a checkpoint may lie below its run's."""

_NOT_OF_A_RUN = ("allowed_packages", "defaults", "hydra", "ckpt", "ckpt_path", "weights", "resume")
"""Keys of a saved config that are not taken over."""
_OF_COMMANDS = ("checks", "compare", "tune")
"""Groups with the settings of a command. A run's config has them because every config does; the command's own count."""


def apply(arguments: Arguments) -> None:
    """Where ``arguments`` have ``ckpt=``, have the config of that run composed in the place of the default one.

    Raises:
        UsageError: there is no such checkpoint, no config of a run beside it, or one that cannot be read; or the
            command line asks for another config as well.
    """
    given = [word for word in arguments.overrides if word.lstrip("+").startswith("ckpt=")]
    if not given:
        return
    asked = given[-1].partition("=")[2].strip("'\"")
    _refuse_contradictions(arguments, asked)
    checkpoint = find(Path(asked).expanduser(), latest=arguments.command == "fit")
    run = run_of(checkpoint)
    if run is None:
        raise UsageError(
            f"ckpt is {asked}, which lies in no folder of a run: there is no {_CONFIG} beside it or above it. Say what"
            f" it belongs to: python -m trainer {arguments.command} +recipe=NAME ckpt_path={asked}"
        )
    arguments.overrides = [word for word in arguments.overrides if word not in given]
    groups = _chosen(arguments)
    node = _config(run, checkpoint, groups)
    ConfigStore.instance().store(name=RESTORED, node=node, provider="run")
    arguments.overrides.append(f"ckpt={quoted(str(checkpoint))}")  # other processes are to take this one
    arguments.flags["--config-name"] = RESTORED
    if is_first() and not is_quiet() and not arguments.shows:
        started = _started_in(run)
        elsewhere = f" That was run in {started}." if started not in (None, str(Path.cwd())) else ""
        print(printable(f"{arguments.command} with {checkpoint.name} and the config of {run}.{elsewhere}"), flush=True)


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote ``checkpoint``; None where there is none above it."""
    for folder in checkpoint.absolute().parents[:_DEEPEST]:
        if (folder / _CONFIG).is_file():
            return from_here(folder)
    return None


def recipe_of(checkpoint: str | None) -> str | None:
    """The recipe of the run that wrote ``checkpoint``, where that is known."""
    run = None if checkpoint is None else run_of(Path(checkpoint))
    recipe = None if run is None else load_run(run).recipe
    return recipe if recipe is not None and re.fullmatch(r"\w[\w./-]*", recipe) else None


def _refuse_contradictions(arguments: Arguments, asked: str) -> None:
    if arguments.command == "compare":
        raise UsageError("ckpt is for fit, validate, test and predict; compare trains anew. Leave it out.")
    if "," in asked and arguments.multirun:
        raise UsageError("ckpt has several values, expected one: each run has a config of its own.")
    keys = {word.lstrip("+~").partition("=")[0] for word in arguments.overrides}
    if "recipe" in keys or arguments.flags.get("--config-name", RESTORED) != RESTORED:
        raise UsageError(
            f"ckpt={asked} brings the config of its run along, and the command line names another. Leave out the"
            " recipe; or, to give the weights to another config, write ckpt_path=FILE for ckpt."
        )
    if "ckpt_path" in keys:
        raise UsageError("Got ckpt and ckpt_path, expected one: ckpt restores the run's config, ckpt_path does not.")


def _chosen(arguments: Arguments) -> dict[str, str]:
    """The config groups that the command line chooses an option of, with it, or the first one of a sweep."""
    composer = Composer(arguments)
    chosen = {}
    for override in composer.parse(arguments.overrides):
        if composer.chooses(override) and not (override.is_add() or override.is_delete()):
            values = override.sweep_string_iterator() if override.is_sweep_override() else iter([str(override.value())])
            chosen[override.key_or_group] = next(values)
    return {group: option for group, option in chosen.items() if not group.startswith("hydra")}


def _config(run: Path, checkpoint: Path, groups: dict[str, str]) -> dict[str, Any]:
    """The primary config: ours where the run has none, the run's, and behind it the options of ``groups``."""
    base = yaml.safe_load((packaged_conf() / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    del base["defaults"]
    left_out = (*_NOT_OF_A_RUN, *_OF_COMMANDS)
    saved = {name: value for name, value in _read(run / _CONFIG).items() if name not in left_out}
    if isinstance(callbacks := saved.get("callbacks"), dict):  # none of this command's trials
        saved["callbacks"] = {
            name: node
            for name, node in callbacks.items()
            if not (isinstance(node, dict) and node.get("_target_") == "trainer.callbacks.OptunaPruning")
        }
    for group in groups:
        saved.pop(group, None)
        base.pop(group, None)
    recipe = recipe_of(str(checkpoint))
    if recipe is not None:
        for section in (base["hydra"]["run"], base["hydra"]["sweep"]):
            section["dir"] = section["dir"].replace("unnamed", recipe.replace("/", "_"))
    defaults: list[Any] = [
        "_schema/trainer@trainer",
        "_self_",
        *({group: option} for group, option in {**dict.fromkeys(_OF_COMMANDS, "default"), **groups}.items()),
        {"override hydra/job_logging": "trainer"},
        {"override hydra/hydra_logging": "none"},
    ]
    return {"defaults": defaults, **base, **saved, "ckpt_path": str(checkpoint)}


def _read(file: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(file, "it is not valid YAML") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("trainer"), dict) or "model" not in saved:
        raise _damaged(file, "expected the settings of a run, with trainer and model among them")
    return {str(name): value for name, value in saved.items()}


def _damaged(file: Path, what: str) -> UsageError:
    return UsageError(
        f"{file} is damaged: {what}. To use the checkpoint all the same, say what it belongs to: +recipe=NAME"
        " ckpt_path=FILE in the place of ckpt."
    )


def _started_in(run: Path) -> str | None:
    """The working directory that the run had; None where that is not known."""
    try:
        told = yaml.safe_load((run / ".hydra" / "hydra.yaml").read_text(encoding="utf-8"))
        return str(told["hydra"]["runtime"]["cwd"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
