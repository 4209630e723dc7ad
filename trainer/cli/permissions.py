"""What a config file may say, and what only the command line may.

A config may come from somebody else; the command line is the user's own. So a config file may name the code that
`trainer.cli.targets` allows, have files written inside of the working directory, and set of Hydra's own node what runs
no code. All of that is judged on the composed config, before anything that it names is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from trainer.arguments import describe
from trainer.cli.arguments import UsageError
from trainer.cli.compose import Composer
from trainer.cli.leaves import Leaf, leaves
from trainer.cli.targets import PACKAGES, Allowlist, within

# Groups whose objects write files, and the arguments by which they are told where.
_WRITERS = ("callbacks", "logger", "trainer")
_NAMES = ("experiment_name", "filename", "name", "run_name", "sub_dir", "version")
_FOLDERS = ("default_root_dir", "dir", "dirpath", "log_dir", "offline_directory", "root_dir", "save_dir")
_FILES = ("exclude_batches_path", "storage")
"""Files, or more, that are written to wherever they are."""
_LOCAL = re.compile(r"^(?:file|local):(?://)?", re.IGNORECASE)

_HYDRA_RUNS = (
    "hydra.callbacks",
    "hydra.hydra_logging",
    "hydra.job.env_set",
    "hydra.job_logging",
    "hydra.launcher",
    "hydra.sweeper",
)
"""What Hydra builds, has logging build, or puts into the environment before a run begins."""
_LOGGING = ("hydra.hydra_logging", "hydra.job_logging")
_PLUGINS = ("hydra.launcher", "hydra.sweeper")
_BASIC = "hydra._internal.core_plugins."
_TEXTS_OF_LOGGING = ("", "datefmt", "format", "level")
"""Settings of logging that are nothing but text; ``""``: the names in a list."""


def keys_said(composer: Composer, overrides: Sequence[Override]) -> set[str]:
    """The keys that the command line gives a value, without those of which it chooses an option."""
    return {override.key_or_group for override in overrides if not composer.chooses(override)}


def _is_said(key: str, said: Collection[str]) -> bool:
    return any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in said)


def _group(key: str) -> str:
    """What a key begins with, such as ``trainer``."""
    return re.split(r"[./\[]", key)[0]


def check(config: dict[str, Any], said: Collection[str], *, resolved: bool) -> None:
    """Judge every setting of a config, but for Hydra's own node.

    Args:
        config: as plain containers. The folder of the run is not known yet, and any name in it.
        said: the keys that the command line sets (`keys_said`).
        resolved: whether interpolations have been; where not, what they stand for is not judged.

    Raises:
        UsageError: a ``_target_`` that a config may not name; packages that are allowed in a file; a name that is a
            path to elsewhere; a folder elsewhere that the command line does not say.
    """
    packages, checkpoint = config["allowed_packages"], config.get("ckpt")
    _check_packages(packages, said)
    allowlist = Allowlist(packages, checkpoint if isinstance(checkpoint, str) else None)
    here = Path.cwd().resolve()
    for leaf in leaves(config):
        if leaf.name == "_target_":
            if resolved or "${" not in str(leaf.value):
                allowlist.judge(str(leaf.value), leaf.key.removesuffix("_target_").removesuffix("."))
        elif resolved and isinstance(leaf.value, str) and _group(leaf.key) in _WRITERS:
            _check_written(leaf, said, here)


def _check_packages(packages: Any, said: Collection[str]) -> None:
    if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
        raise UsageError(f"allowed_packages is {describe(packages)}, expected a list of packages: [timm].")
    if packages and not any(_is_said(key, ["allowed_packages"]) for key in said):
        raise UsageError(
            f"allowed_packages is {describe(packages)} in a config file, where it does not count: what a config may"
            f" name is the user's to say. Write 'allowed_packages=[{','.join(packages)}]' on the command line."
        )


# --- names and folders ----------------------------------------------------------------------------------------


def check_option(group: str, name: str) -> None:
    """An option of a config group is found in the folders of configs.

    Raises:
        UsageError: ``name`` leads out of them.
    """
    if _leads_out(name):
        raise UsageError(
            f"{group}={name} is a path, expected the name of an option. Configs elsewhere are found with --config-dir"
            f" FOLDER, which has the folder {group} in it."
        )


def _check_written(leaf: Leaf, said: Collection[str], here: Path) -> None:
    """Judge a text of something that writes files.

    A class of the user's own may read files as well; of a class of a known package any text may be where it writes.
    """
    key, value = leaf.key, leaf.value
    if leaf.name in _NAMES and _leads_out(value):
        raise UsageError(
            f"{key} is {value}, expected a name that stays in its folder: without '..', a root, or a $VARIABLE"
            " that has one."
        )
    if _is_said(key, said):
        return
    if leaf.name in _FILES:
        raise UsageError(
            f"{key} is {value} in a config file. It is written to, wherever it is, so it is named on the"
            f" command line: {key}={value}"
        )
    is_ours = leaf.target.partition(".")[0] in PACKAGES
    is_web = re.match(r"https?://(?!.*::)", value) and "_args_[" not in key
    if leaf.name in _FOLDERS or (is_ours and not is_web):
        _check_folder(key, value, here)


def _check_folder(key: str, value: str, here: Path) -> None:
    folder = _LOCAL.sub("", value)
    if "://" not in folder and _is_inside(here, folder):
        return
    how = "give the argument by its name, on the command line." if "[" in key else ""
    raise UsageError(
        f"{key} leads to {value}, which is not in the working directory. To write there,"
        f" {how or f'say so on the command line: {key}={value}'}"
    )


def _leads_out(name: str) -> bool:
    name = os.path.expandvars(name)  # as some loggers do
    parts = re.split(r"[/\\]", name)
    is_path = ".." in parts or (len(parts) > 1 and not parts[0]) or bool(re.match(r"[a-zA-Z]:[/\\]|~|\w+://", name))
    return is_path or not name.isprintable()


def _is_inside(folder: Path, path: str) -> bool:
    """Whether ``path``, as it would be read in ``folder``, is in there. Links are followed."""
    try:
        return (folder / Path(os.path.expandvars(path)).expanduser()).resolve().is_relative_to(folder.resolve())
    except (RuntimeError, ValueError):  # a home that nobody has, a zero byte
        return False


# --- Hydra's own node -----------------------------------------------------------------------------------------


def check_hydra(composer: Composer, config: DictConfig, overrides: Sequence[Override]) -> None:
    """Judge Hydra's own node, which does its work before a run begins.

    Args:
        composer: finds what comes with us and with Hydra.
        config: composed; Hydra's own config is set to it.
        overrides: those of the command line.

    Raises:
        UsageError: a config file sets what Hydra would run, an environment variable, or a folder elsewhere.
    """
    said = keys_said(composer, overrides)
    node = OmegaConf.to_container(config.hydra, resolve=False)
    assert isinstance(node, dict)
    _check_what_runs(composer, node, said, overrides)
    _check_swept(node["sweeper"].get("params"), said)
    _check_folders(config, said)


def _check_what_runs(
    composer: Composer, node: dict[Any, Any], said: Collection[str], overrides: Sequence[Override]
) -> None:
    """Refuse what Hydra would run, unless it comes with us, with Hydra, or from the command line."""
    known: dict[str, Any] = {}
    for kind in ("hydra_logging", "job_logging"):
        chosen = node["runtime"]["choices"].get(f"hydra/{kind}")
        known |= {leaf.key: leaf.value for leaf in leaves(composer.packaged(f"hydra/{kind}/{chosen}"), f"hydra.{kind}")}
    for key in _PLUGINS:
        plugin = node[key.removeprefix("hydra.")]
        if not isinstance(plugin, dict) or not isinstance(plugin.get("_target_"), str):
            raise UsageError(f"{key} is {describe(plugin)}, expected a node with a _target_.")
        if plugin["_target_"].startswith(_BASIC):
            known[f"{key}._target_"] = plugin["_target_"]
        elif f"{key}._target_" not in known:
            chosen_there = composer.compose(_of_hydra(composer, overrides))
            known |= {leaf.key: leaf.value for leaf in leaves(OmegaConf.to_container(chosen_there.hydra), "hydra")}
    for leaf in leaves(node, "hydra"):
        if not within(leaf.key, _HYDRA_RUNS) or within(leaf.key, ("hydra.sweeper.params",)):
            continue
        if _is_said(leaf.key, said):
            if leaf.name == "_target_" and within(leaf.key, ("hydra.callbacks",)):
                Allowlist().judge(str(leaf.value), leaf.key.removesuffix("._target_"))
        elif known.get(leaf.key) != leaf.value and not _runs_nothing(leaf):
            plugin = next((key for key in _PLUGINS if within(leaf.key, (key,))), None)
            chosen = f"chosen on the command line: {plugin.replace('.', '/')}=NAME" if plugin else ""
            raise UsageError(
                f"{leaf.key} is {describe(leaf.value)} in a config file. Hydra would run what it says, or put it into"
                f" the environment, so it is {chosen or f'said on the command line: {leaf.key}={leaf.value}'}"
            )


def _of_hydra(composer: Composer, overrides: Sequence[Override]) -> list[str]:
    """The words of the command line that are about Hydra's own node."""
    words = [str(one.input_line) for one in overrides if one.key_or_group.replace("/", ".").startswith("hydra.")]
    return [word for word in words if not any(one.is_sweep_override() for one in composer.parse([word]))]


def _runs_nothing(leaf: Leaf) -> bool:
    """Whether it is a number for a launcher, a sweeper or a log, or plain text for a log."""
    if not within(leaf.key, (*_LOGGING, *_PLUGINS)):
        return False
    if isinstance(leaf.value, str):
        is_plain = "${" not in leaf.value and "://" not in leaf.value  # logging looks up ext:// and cfg://
        return within(leaf.key, _LOGGING) and leaf.name in _TEXTS_OF_LOGGING and is_plain
    return leaf.name != "_target_"


def _check_swept(params: Any, said: Collection[str]) -> None:
    """What a file sweeps over is on the jobs' command lines, where it would count as the user's own word."""
    for name, value in (params or {}).items():
        key = str(name).lstrip("+~")
        if f"hydra.sweeper.params.{name}" in said:
            continue
        is_written_to = _group(key) in (*_WRITERS, "ckpt_path") and re.search(r"[/\\~$]", str(value))
        if is_written_to or _group(key) in ("allowed_packages", "hydra"):
            raise UsageError(
                f"hydra.sweeper.params sweeps over {name}, with {value}, which only the command line may: write"
                f" {name}=VALUES there."
            )


def _check_folders(config: DictConfig, said: Collection[str]) -> None:
    """A file may choose a folder in the working directory for its runs; on the command line any may be chosen."""
    here = Path.cwd().resolve()
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        folder = str(OmegaConf.select(config, key))
        if not folder:
            raise UsageError(f"{key} is empty, expected a folder for the run, such as outputs/NAME.")
        if _is_said(key, said):
            continue
        if not folder.isprintable():
            raise UsageError(f"{key} is {folder!r}, expected a name without line breaks and other control characters.")
        _check_folder(key, folder, here)
        parts = (here / folder).resolve().relative_to(here).parts
        if not parts or parts[0].startswith("."):  # where your own files are, or those of git
            raise UsageError(
                f"{key} is {folder}, expected a folder for the run, such as outputs/NAME. To write there, say so on the"
                f" command line: {key}={folder}"
            )
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise UsageError(
            "hydra.job.chdir is true, expected false: modules and paths are found from the folder that the command is"
            " run in. The run's own folder is ${hydra:runtime.output_dir}."
        )
    name = str(OmegaConf.select(config, "hydra.job.name"))
    if not re.fullmatch(r"[^/\\]+", name) or name in (".", "..") or not name.isprintable():
        raise UsageError(f"hydra.job.name is {name!r}, expected a name without slashes: files are called so.")
    with read_write(config.hydra), open_dict(config.hydra):
        job = config.hydra.job
        before: Any = OmegaConf.to_container(job, resolve=False)
        job.num, job.id = 0, "0"  # a job of a sweep has them, and its folder's name
        folders = {key: OmegaConf.select(config, key) for key in ("hydra.output_subdir", "hydra.sweep.subdir")}
        job.num, job.id = before["num"], before["id"]
    for key, value in folders.items():
        if value is not None and not _is_inside(here, str(value)):
            raise UsageError(f"{key} is {value}, expected a folder inside of the run's.")
