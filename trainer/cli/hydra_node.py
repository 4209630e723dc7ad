"""What a config may tell Hydra itself, in the node ``hydra``: nothing that runs code, no folder of its own choosing.

Hydra builds callbacks, launchers, sweepers and logging handlers from its node, sets environment variables and makes
folders, before a run begins. A recipe may come from somebody else; the command line is the user's own. So a config file
may set here what cannot do harm, and the rest is for the command line.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from trainer.cli.arguments import UsageError
from trainer.cli.compose import Composer
from trainer.cli.places import is_inside
from trainer.cli.schema import describe
from trainer.cli.targets import Allowlist, targets

_BASIC = "hydra._internal.core_plugins."
_HANDLERS = (
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.StreamHandler",
    "logging.handlers.RotatingFileHandler",
    "logging.handlers.TimedRotatingFileHandler",
    "rich.logging.RichHandler",
)
_FORMATTERS = ("logging.Formatter", "colorlog.ColoredFormatter")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
# What may be filled in there: parts of Hydra's own node, the time, the environment. Nothing that could be a node.
_HARMLESS = re.compile(r"\$\{(hydra[.:][\w.]+|now:[^{}$]*|oc\.env:\w+(,[^{}$]*)?)\}")


def check(composer: Composer, config: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse what a config file may not tell Hydra.

    Args:
        composer: composes the config once more where a launcher of others is in play.
        config: composed; Hydra's own config is set to it.
        overrides: those of the command line.

    Raises:
        UsageError: a target, a logging handler, an environment variable or a folder that is the command line's to set.
    """
    given = [override.key_or_group for override in overrides]
    node = OmegaConf.to_container(config.hydra, resolve=False)
    assert isinstance(node, dict)
    _check_callbacks(node.get("callbacks"))
    for name in ("job_logging", "hydra_logging"):
        _check_logging(node.get(name), f"hydra.{name}", given)
    _check_plugins(composer, node, overrides)
    _check_environment(node, given)
    _check_sweep(node, given)
    _check_folders(config, given)


def check_allowed_packages(packages: Any, overrides: Sequence[Override]) -> None:
    """Packages are allowed by the user, on the command line, and by no file.

    Raises:
        UsageError: they are not a list of names, or come from a config file.
    """
    if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
        raise UsageError(f"allowed_packages is {describe(packages)}, expected a list of packages: [timm].")
    if packages and not any(_is_set(override.key_or_group, "allowed_packages") for override in overrides):
        raise UsageError(
            f"allowed_packages is {describe(packages)} in a config file, where it does not count: what a config may"
            f" name is the user's to say. Write 'allowed_packages=[{','.join(packages)}]' on the command line."
        )


def _is_set(key: str, what: str) -> bool:
    key = key.replace("/", ".")
    return key == what or key.startswith(f"{what}.") or what.startswith(f"{key}.")


def _strings(node: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Key, last name and text of every string in ``node``, names of settings among them."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield f"{key}.{name}", "", str(name)
            if isinstance(child, str):
                yield f"{key}.{name}", str(name), child
            else:
                yield from _strings(child, f"{key}.{name}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            if isinstance(child, str):
                yield f"{key}[{index}]", "", child
            else:
                yield from _strings(child, f"{key}[{index}]")


def _check_plain(node: Any, key: str) -> None:
    """Nothing in ``node`` is filled in from elsewhere that could turn out to be a node of its own."""
    for place, name, text in _strings(node, key):
        if "${" in _HARMLESS.sub("", text) or ("${" in text and name in ("_target_", "class", "()")):
            raise UsageError(f"{place} is {text}, expected text: what Hydra runs cannot be filled in from elsewhere.")


def _check_callbacks(callbacks: Any) -> None:
    if not callbacks:
        return
    if not isinstance(callbacks, dict):
        raise UsageError(f"hydra.callbacks is {describe(callbacks)}, expected a node for each callback.")
    _check_plain(callbacks, "hydra.callbacks")
    allowlist = Allowlist()
    for name, callback in callbacks.items():
        key = f"hydra.callbacks.{name}"
        if callback is not None and not isinstance(callback, dict):
            raise UsageError(f"{key} is {describe(callback)}, expected a node with a _target_.")
        for place, target in targets(callback, key):
            if target != "hydra.experimental.callbacks.LogJobReturnCallback":
                allowlist.locate(target, place)


def _check_logging(node: Any, key: str, given: list[str]) -> None:
    if node is None:
        return
    if not isinstance(node, dict):
        raise UsageError(f"{key} is {describe(node)}, expected a node with formatters and handlers.")
    _check_plain(node, key)
    for place, name, text in _strings(node, key):
        wanted: tuple[str, ...] | None = None
        if name in ("class", "()"):
            wanted = _FORMATTERS if ".formatters." in place else _HANDLERS if name == "class" else ()
        elif text in ("()", "."):
            if not (text == "()" and ".formatters." in place):
                raise UsageError(f"{place} names code to run, which logging may not. Leave it out.")
        elif "ext://" in text or "cfg://" in text:
            wanted = _STREAMS
        elif name == "style":
            wanted = ("%", "$")  # a "{" reads attributes of what is logged, and so anything
        elif name == "filename":
            _check_log_file(text, place, given)
        if wanted is not None and text not in wanted:
            raise UsageError(f"{place} is {text}, expected {' or '.join(wanted) or 'nothing there'}.")


def _check_log_file(text: str, key: str, given: list[str]) -> None:
    inside = re.sub(r"^\$\{hydra[.:](runtime\.output_dir|run\.dir|sweep\.dir)\}/", "", text)
    is_log = inside != text and ".." not in Path(inside).parts and "${oc.env" not in inside and inside.endswith(".log")
    if not is_log and key not in given:
        raise UsageError(
            f"{key} is {text}, expected a file in the run's folder: ${{hydra.runtime.output_dir}}/NAME.log. To have it"
            f" elsewhere, write {key}=FILE on the command line."
        )


def _check_plugins(composer: Composer, node: dict[Any, Any], overrides: Sequence[Override]) -> None:
    """Launchers and sweepers of others run what their settings say: they are chosen on the command line."""
    reference: dict[Any, Any] | None = None
    for name in ("launcher", "sweeper"):
        plugin, key = node.get(name), f"hydra.{name}"
        if not isinstance(plugin, dict) or not isinstance(plugin.get("_target_"), str):
            raise UsageError(f"{key} is {describe(plugin)}, expected a node with a _target_.")
        settings = {setting: value for setting, value in plugin.items() if setting != "params"}
        if plugin["_target_"].startswith(_BASIC):
            inner = [target for place, target in targets(settings, key) if place != key]
            if not inner and not any("${" in text for _, _, text in _strings(settings, key)):
                continue
        if reference is None:
            own = [str(o.input_line) for o in overrides if o.key_or_group.replace("/", ".").startswith("hydra.")]
            composed = OmegaConf.to_container(composer.compose([w for w in own if not _sweeps(w, composer)]).hydra)
            assert isinstance(composed, dict)
            reference = composed
        plain = {setting: value for setting, value in (reference[name] or {}).items() if setting != "params"}
        if settings != plain:
            raise UsageError(
                f"{key} is set by a config file, to {plugin['_target_']} with settings of its own; a launcher or a"
                f" sweeper may run anything, so it is chosen on the command line: hydra/{name}=NAME."
            )


def _sweeps(word: str, composer: Composer) -> bool:
    return any(override.is_sweep_override() for override in composer.parse([word]))


def _check_environment(node: dict[Any, Any], given: list[str]) -> None:
    for name, value in (node["job"].get("env_set") or {}).items():
        key = f"hydra.job.env_set.{name}"
        if not any(_is_set(one, key) for one in given):
            raise UsageError(
                f"{key} is {describe(value)} in a config file; the environment is the user's. Write {key}={value} on"
                " the command line, or export the variable."
            )


def _check_sweep(node: dict[Any, Any], given: list[str]) -> None:
    """What a file sweeps over is on the jobs' command lines, where it would count as the user's own word."""
    sweeper = node.get("sweeper")
    params = sweeper.get("params") if isinstance(sweeper, dict) else None
    for name, value in (params or {}).items():
        key = str(name).lstrip("+~")
        if f"hydra.sweeper.params.{name}" in given:
            continue
        is_written_to = re.match(r"(callbacks|ckpt_path|logger|trainer)\b", key) and re.search(r"[/\\~$]", str(value))
        if is_written_to or re.match(r"(hydra|allowed_packages)\b", key):
            raise UsageError(
                f"hydra.sweeper.params sweeps over {name}, with {value}, which only the command line may: write"
                f" {name}=VALUES there."
            )


def _check_folders(config: DictConfig, given: list[str]) -> None:
    """Folders that a config chooses are in the working directory; what is chosen on the command line is the user's."""
    here = Path.cwd()
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        folder = str(OmegaConf.select(config, key))
        if not folder:
            raise UsageError(f"{key} is empty, expected a folder for the run, such as outputs/NAME.")
        if any(_is_set(one, key) for one in given):
            continue
        if not folder.isprintable():
            raise UsageError(f"{key} is {folder!r}, expected a name without line breaks and other control characters.")
        if not is_inside(here, folder):
            raise UsageError(
                f"{key} leads to {folder}, which is not in the working directory. To write there, say so on the command"
                f" line: {key}={folder}"
            )
        parts = (here / folder).resolve().relative_to(here.resolve()).parts
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
    numbered = copy.deepcopy(config)
    with read_write(numbered.hydra), open_dict(numbered.hydra):
        numbered.hydra.job.num, numbered.hydra.job.id = 0, "0"
    for key in ("hydra.output_subdir", "hydra.sweep.subdir"):
        value = OmegaConf.select(numbered, key)
        if value is not None and not is_inside(here, str(value)):
            raise UsageError(f"{key} is {value}, expected a folder inside of the run's.")


def check_all_targets(config: dict[str, Any], overrides: Sequence[Override], *, resolved: bool) -> None:
    """Refuse, by name, what ``config`` asks for and may not.

    Args:
        config: as plain containers.
        overrides: those of the command line.
        resolved: whether interpolations have been; where not, what they stand for is not known.

    Raises:
        UsageError: see `trainer.cli.targets.Allowlist` and `check_allowed_packages`.
    """
    packages, checkpoint = config["allowed_packages"], config.get("ckpt")
    check_allowed_packages(packages, overrides)
    allowlist = Allowlist(packages, checkpoint if isinstance(checkpoint, str) else None)
    for key, target in targets(config):
        if resolved or "${" not in target:
            allowlist.check({"_target_": target}, key)
