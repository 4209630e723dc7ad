"""Compose the config with Hydra: the search path, and Hydra's errors reworded for users."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job, setup_globals
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.cli import plugins
from trainer.cli.folders import packaged_conf, user_conf
from trainer.cli.parsing import GROUPS_TO_ADD, Arguments, UsageError
from trainer.cli.processes import is_first
from trainer.cli.schema import SETTINGS, TrainerSettings
from trainer.common import redaction
from trainer.errors import did_you_mean

CONFIG_NAME = "amp_trainer"
RESTORED = "amp_trainer_restored"
"""The name of the config of an earlier run, which `trainer.cli.restore` uses instead of the default config."""
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Hydra 1.3 needs this argument to use its own defaults; 1.4 always uses them, and deprecates the argument."""

DEFAULTS_ADVICE = (
    "To choose an option in a config file, write `- override /GROUP: OPTION` at the end of its defaults list, or"
    " `- OPTION` for another file of the same group. On the command line, write GROUP=OPTION without a +, or"
    " GROUP=[A,B] for several."
)
"""The advice of messages about the choice of options."""


class UserConfigs(SearchPathPlugin):
    """Search the user's ``./conf``, if it exists, before the configs of this package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder. Hydra calls this when it creates a search path."""
        folder = user_conf()
        if folder is not None:
            search_path.prepend(provider="user", path=f"file://{folder}", anchor="main")


def register() -> None:
    """Register the user's configs and the schema of the ``trainer`` node with Hydra. May be called repeatedly."""
    redaction.register()
    if VERSION_BASE:
        version.setbase(VERSION_BASE["version_base"])
    setup_globals()
    Plugins.instance().register(UserConfigs)
    plugins.take_over_configs()
    if "_schema" not in ConfigStore.instance().repo:  # Hydra 1.4 warns if a config is stored again
        ConfigStore.instance().store(group="_schema", name="trainer", node=TrainerSettings, provider="trainer")


class _Loader(ConfigLoaderImpl):
    """Pass the config to ``check`` before overrides set values in it."""

    check: Callable[[dict[str, Any]], None] | None = None

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        config = super()._compose_config_from_defaults_list(defaults, repo)
        check, self.check = self.check, None  # because `check` may compose other configs
        if check is not None:
            check(unresolved(config))
        return config


class Composer:
    """Compose the same configs as `hydra.main`, and raise `UsageError` if that fails.

    Args:
        arguments: the command line.

    Attributes:
        arguments: as given.
        config_name: name of the primary config.

    Raises:
        UsageError: if the value of ``--config-dir`` or ``--config-path`` is not a folder.
    """

    def __init__(self, arguments: Arguments) -> None:
        register()
        self.arguments = arguments
        for flag in ("--config-dir", "--config-path"):
            if not Path(arguments.flags.get(flag, ".")).is_dir():
                raise UsageError(f"{flag} is {arguments.flags[flag]}, expected a folder that exists.")
        main = arguments.flags.get("--config-path")
        search_path = create_config_search_path(str(Path(main).resolve()) if main else str(packaged_conf()))
        extra = arguments.flags.get("--config-dir")
        if extra is not None:
            path = f"file://{Path(extra).resolve()}"
            search_path.prepend(provider="command-line", path=path, anchor=SearchPathQuery(provider="schema"))
        self.config_name = arguments.flags.get("--config-name", CONFIG_NAME)
        self.loader = _Loader(search_path)
        self.parser = OverridesParser.create(config_loader=self.loader)
        places = [word for word in arguments.overrides if word.startswith("hydra.searchpath=")]
        self.parse(places)  # raises if one is malformed
        _, repository = self.loader._parse_overrides_and_create_caching_repo(self.config_name, places)
        self.loader.repository = repository  # type: ignore[assignment]

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Return the parsed overrides.

        Raises:
            UsageError: if Hydra cannot parse one.
        """
        parsed = []
        for override in overrides:
            try:
                parsed.extend(self.parser.parse_overrides([override]))
            except HydraException as error:
                raise UsageError(self._explain_syntax(override, str(error))) from error
        return parsed

    def _explain_syntax(self, override: str, reason: str) -> str:
        """Return the message for an override that Hydra cannot parse. It shows quotes if they would help."""
        key, _, value = override.partition("=")
        quoted = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
        remark = re.search(r"\w+ while evaluating .*", reason)
        problem = f"{_one_paragraph(remark[0] if remark else reason.partition(chr(10))[0])}."
        with suppress(HydraException):
            self.parser.parse_override(quoted)
            advice = "A value with spaces, commas, brackets or other special characters needs its own quotes."
            problem += f" {advice} If it is a text: {shlex.quote(quoted)}"
        return f"Cannot parse the setting {override!r}: {problem}"

    @property
    def repository(self) -> Any:
        """Hydra's repository of the config groups, their options and their files."""
        return self.loader.repository

    def chooses(self, override: Override) -> bool:
        """Return whether ``override`` chooses an option of a config group instead of setting a value."""
        return self.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)

    def groups(self) -> list[str]:
        """Return the config groups, without those of Hydra and of the schema."""
        groups = self.repository.get_group_options("", ObjectType.GROUP)
        return [group for group in groups if group not in ("hydra", "_schema")]

    def files(self, words: Sequence[str]) -> Iterator[tuple[Path, str, str]]:
        """Iterate over file, config group and package of each file of a config, in the order of merging."""
        for default in self.loader.compute_defaults_list(self.config_name, list(words), RunMode.RUN).defaults:
            path, package = str(default.config_path), default.package or ""
            loaded = self.repository.load_config(path)
            if loaded is not None and loaded.path.startswith("file://") and not package.startswith("hydra"):
                yield Path(loaded.path.removeprefix("file://"), f"{path}.yaml"), path.rpartition("/")[0], package

    def compose(self, overrides: Sequence[str], check: Callable[[dict[str, Any]], None] | None = None) -> DictConfig:
        """Return the composed config, including the ``hydra`` node.

        Args:
            overrides: the command line.
            check: called with the unresolved config before ``overrides`` set values in it.

        Raises:
            UsageError: if a config or an override is invalid.
        """
        self.loader.check = check
        try:
            return self.loader.load_configuration(self.config_name, list(overrides), RunMode.RUN)
        except (ConfigCompositionException, OmegaConfBaseException, MissingConfigException) as error:
            raise UsageError(self._explain_defaults(error) or explain(error)) from error
        except YAMLError as error:
            raise UsageError(f"A config file is not valid YAML: {_one_paragraph(str(error))}.") from error
        except RecursionError as error:
            raise UsageError("A config is nested too deeply: Python's recursion limit was exceeded.") from error
        except UsageError:  # raised by `check`; the next clause would catch it, as a ValueError
            raise
        except (HydraException, ValueError) as error:  # the latter for a defaults list that is not a list
            raise UsageError(f"{_one_paragraph(str(error))}.") from error

    def _explain_defaults(self, error: Exception) -> str | None:
        """Return the message for an error in the defaults list of a config file; None for other errors."""
        text, path = str(error), getattr(error, "missing_cfg_file", None) or ""
        if path.partition("/")[0] in GROUPS_TO_ADD and path.count("/") > 1:
            text = f"There is no config {path}"
        elif not re.search(r"Multiple values for|No match in the defaults|No earlier|DictConfig with ListConfig", text):
            return None
        # the messages of Hydra 1.3 and 1.4
        unknown = re.search(r"(?:Could not override|No earlier Group Default for) '(?:\w+/)?(\w+)", text)
        hint = did_you_mean(unknown[1], self.groups()) if unknown else ""
        return f"{_one_paragraph(re.split('full_key|To override', text)[0])}.{hint} {DEFAULTS_ADVICE}"

    def placed(self, config: DictConfig, folder: Path) -> DictConfig:
        """Return ``config`` with the folder of the run, which was added as the last override of the command line."""
        if not is_first():
            return self.compose(self.arguments.config_overrides())  # the other ranks have additional overrides
        OmegaConf.set_readonly(config.hydra, None)
        config.hydra.run.dir, config.hydra.mode = str(folder), RunMode.RUN
        config.hydra.overrides.hydra.append(self.arguments.overrides[-1])
        return config

    def show(self, task: TaskFunction) -> None:
        """Print the config or Hydra's help, as the flags request. Hydra exits after some of them."""
        hydra.main(config_path=str(packaged_conf()), config_name=CONFIG_NAME, **VERSION_BASE)(task)()

    def run(self, config: DictConfig, task: TaskFunction) -> None:
        """Do the same as `Hydra.run`, with a config that is already composed. Raise the exceptions of ``task``."""
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=self.config_name)
        returned = run_job(task, config, "hydra.run.dir", None, HydraContext(self.loader, callbacks))
        callbacks.on_run_end(config=config, config_name=self.config_name, job_return=returned)
        if isinstance(error := returned._return_value, Exception):
            raise error  # `returned.return_value` would print all overrides first

    def swept(self, config: DictConfig) -> list[str]:
        """Return the names of the settings for which the jobs of a sweep have different values.

        Empty if a sweeper such as Optuna's chooses the values, because it assigns them to jobs itself.
        """
        if "BasicSweeper" not in config.hydra.sweeper["_target_"]:
            return []
        words = [override for override in self.parse(self.arguments.overrides) if override.is_sweep_override()]
        params = [str(name) for name in config.hydra.sweeper.get("params") or {}]
        return [*params, *(override.get_key_element().lstrip("+") for override in words)]

    def sweep(self, task: TaskFunction) -> None:
        """Run a sweep with Hydra. The launcher calls ``task`` for each job."""
        runner = Hydra("trainer", self.loader)
        GlobalHydra.instance().initialize(runner)
        try:
            runner.multirun(self.config_name, task, [*self.arguments.config_overrides(), "hydra.mode=MULTIRUN"])
        finally:
            GlobalHydra.instance().clear()


def unresolved(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Return the config as plain containers, with interpolations as text, or with their values if ``resolve``."""
    plain = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain containers, with each interpolation replaced by its value.

    Raises:
        UsageError: if a value is missing, or an interpolation refers to a missing value.
    """
    with resolution_errors():
        return unresolved(config, resolve=True)


@contextmanager
def resolution_errors() -> Iterator[None]:
    """Raise a `UsageError` for a missing value, or an interpolation that cannot be resolved."""
    try:
        yield
    except MissingMandatoryValue as error:
        raise UsageError(f"{error.full_key} has no value. Set it: {error.full_key}=VALUE.") from error
    except OmegaConfBaseException as error:
        problem = _one_paragraph(str(error.msg or error).partition(chr(10))[0])
        unset = re.search(r"Environment variable '(.+?)' not found", problem)
        hint = f" Set it, or give a default: ${{oc.env:{unset[1]},VALUE}}." if unset else ""
        if unknown := re.fullmatch(r"Unsupported interpolation type (\S+)", problem):
            hint = f" Register it in ./hydra_plugins: OmegaConf.register_new_resolver('{unknown[1]}', FUNCTION)."
        raise UsageError(f"{error.full_key}: {problem}.{hint}") from error


def explain(error: Exception) -> str:
    """Return an error of Hydra as one paragraph for users."""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        hint = did_you_mean(option, error.options or ())
        one_of = f" Choose one of: {', '.join(error.options)}." if error.options else ""
        place = f"Config group {group}" if group else "The config folder"
        return f"{place} has no option {option!r}.{hint}{one_of}"
    if no_value := re.match(r"Could not delete from config. '(.+)' does not exist", str(error)):
        key = no_value[1]
        return f"Hydra cannot delete {key}, because it has no value. Give it a value first: {key}=0 ~{key}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    config = re.match(r"In '([^']+)'", str(error))
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = cause.full_key
        is_restored = config is not None and config[1] == RESTORED
        file = "The config of that run: " if is_restored else f"conf/{config[1]}.yaml: " if config else ""
        name = key.removeprefix("trainer.")
        if key.startswith("trainer.") and name not in SETTINGS:
            is_group = name in ("callbacks", "logger", "precision")
            hint = f" {DEFAULTS_ADVICE}" if is_group else did_you_mean(name, SETTINGS)
            return f"{file}There is no setting {key!r}.{hint}"
        message = _one_paragraph(str(cause.msg or cause).partition("full_key:")[0])
        if "is not in struct" in message:
            return f"{file}There is no setting {key!r}. To add a new setting, write +{key}=VALUE."
        return f"{file}{key}: {message}."
    return f"{_one_paragraph(str(error))}."


def _one_paragraph(text: str) -> str:
    return " ".join(text.split()).rstrip(".^ ")
