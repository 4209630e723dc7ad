"""The configs of the package, the precedence of the user's, and the output of Hydra's options."""

import inspect
import re
from unittest.mock import patch

import pytest
import yaml
from omegaconf import OmegaConf

from tests.cli.conftest import write
from tests.support import make_trainer
from trainer.arguments import ACCELERATORS, ARGUMENTS, STRATEGIES
from trainer.cli import main
from trainer.cli.commands import find, names
from trainer.cli.compose import Composer
from trainer.cli.config_checks import validate
from trainer.cli.folders import packaged_conf
from trainer.cli.keys import meanings, options
from trainer.cli.parsing import GROUPS_TO_ADD, Arguments, read
from trainer.cli.recipes import annotated
from trainer.cli.targets import Allowlist
from trainer.precision.registry import PLUGINS

DESCRIBED = ("precision", "trainer", "callbacks", "logger", "optimizer", "scheduler", "data")
OTHERS = ("compare", "debug", "model", "sweep")


def shown(capsys, *argv):
    """The config that --cfg job prints."""
    assert main([*argv, "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def without_meaning(composer, words, config):
    """Return the lines of a composed config that have no comment, without Hydra's keys such as ``_target_``."""
    shown = {name: value for name, value in config.items() if name != "hydra"}
    lines = list(annotated(shown, meanings(composer, words)[0]))
    return [line for line in lines if " # " not in line and not line.lstrip().startswith("_")]


@pytest.mark.whole
@pytest.mark.parametrize("groups", [DESCRIBED, OTHERS])
def test_every_option_composes_with_meanings_and_arguments_of_its_target(groups):
    composer = Composer(Arguments())
    options = {group: [file.stem for file in sorted((packaged_conf() / group).glob("*.yaml"))] for group in groups}
    assert options == {group: composer.repository.get_group_options(group) for group in groups}
    for number in range(max(map(len, options.values()))):
        chosen = {group: names[number % len(names)] for group, names in options.items()}
        words = [f"{'+' if group in GROUPS_TO_ADD else ''}{group}={option}" for group, option in chosen.items()]
        config = composer.compose(words)
        assert chosen.items() <= dict(config.hydra.runtime.choices).items()
        settings = OmegaConf.to_container(config)
        bare = {"  learning_rate_monitor: null"}  # by logger=none, with callbacks that do not include it
        assert groups is OTHERS or bare.issuperset(without_meaning(composer, words, settings))
        Allowlist(()).check({name: settings[name] for name in settings if name != "hydra"})
        for group in set(DESCRIBED).intersection(groups) - {"trainer"}:
            node = settings[group] or {}
            for part in filter(None, [node] if "_target_" in node else node.values()):
                names = {name for name in part if not name.startswith("_")}
                assert names <= set(inspect.signature(Allowlist(()).locate(part["_target_"])).parameters), chosen[group]


RECIPES = [file.stem for file in sorted((packaged_conf() / "recipe").glob("*.yaml"))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_with_meanings(recipe):
    needed = ["model.folder=x"] if recipe == "finetune" else ["data.root=x"] if recipe == "images" else []
    words = [f"+recipe={recipe}", *needed]
    config = validate(read(["fit", *words]))
    assert config.model._target_.startswith("recipes.")
    assert without_meaning(Composer(Arguments()), words, OmegaConf.to_container(config)) == []


def test_every_precision_has_an_option():
    assert sorted(PLUGINS) == sorted(Composer(Arguments()).repository.get_group_options("precision"))


def test_custom_precision_is_a_module_and_an_option(project, tmp_path):
    module = """
        import torch
        from trainer.precision import Precision

        class TensorFloat32(Precision):
            name = "tf32-true"
            names = {"tf32-true": {}}
    """
    write(project, {"mine.py": module, "conf/precision/tf32-true.yaml": "_target_: mine.TensorFloat32\n"})
    with patch.dict(PLUGINS):
        assert main(["fit", "+recipe=line", "precision=tf32", "+debug=fast_dev_run"]) == 0
        trainer = make_trainer(tmp_path, precision="tf32")
    assert trainer.precision == "tf32-true"
    assert trainer.engine.precision.is_half is False


def test_learning_rate_monitor_is_dropped_without_a_logger(project, capsys):
    config = shown(capsys, "fit", "+recipe=line", "logger=none")
    assert config["logger"] == {}
    assert config["callbacks"]["learning_rate_monitor"] is None
    assert config["callbacks"]["scale_monitor"] is not None


@pytest.mark.whole
def test_options_of_the_user_have_precedence(project, capsys):
    write(project, {"conf/optimizer/adam.yaml": "lr: 7\n", "conf/config.yaml": "seed: 1\n"})
    assert shown(capsys, "fit", "+recipe=line", "optimizer=adam")["optimizer"] == {"lr": 0.1}  # the recipe's lr
    config = shown(capsys, "fit", "optimizer=adam")
    assert (config["optimizer"], config["seed"]) == ({"lr": 7}, 42)  # config.yaml is not the default config


def test_config_dir_is_searched(project, tmp_path, capsys):
    write(tmp_path, {"elsewhere/recipe/far.yaml": "# @package _global_\n# Far away.\nseed: 5\n"})
    assert shown(capsys, "fit", "--config-dir", "elsewhere", "+recipe=far")["seed"] == 5
    assert main(["recipes", "--config-dir", "elsewhere"]) == 0
    assert ["far", "Far away."] in [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]


def test_first_screen_names_every_command_and_every_recipe(project, capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in (*names(), *options("recipe")):
        assert name in out
    assert len(out.splitlines()) < 40  # a screen
    assert max(map(len, out.splitlines())) <= 120
    assert main([]) == 0
    assert capsys.readouterr().out == out


def test_help_of_a_command_names_every_option(project, capsys):
    assert main(["fit", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("early_stopping", "-m", "--debug", "other", "ckpt=null", "imagefolder", *ARGUMENTS):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120
    for command in names():
        if command != "fit":
            assert main([command, "--help"]) == 0
            out = capsys.readouterr().out
            assert f"usage: python -m trainer {command}" in out
            assert not re.search(r"^  (?:trainer\.|seed=|\+recipe=|--debug)", out, re.MULTILINE)
            takes_settings = "SETTING" in find(command).usage
            assert ("`python -m trainer fit --help` lists the settings and flags." in out) == takes_settings
            assert (f"  {command}." in out) == (command in ("compare", "tune", "checks"))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trainer 0.")


def test_lightnings_accelerators_and_strategies_are_known():
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    assert set(AcceleratorRegistry.available_accelerators()) <= set(ACCELERATORS)
    names = StrategyRegistry.available_strategies()
    assert set(names) - {"deepspeed_stage_3_offload_nvme"} <= set(STRATEGIES)  # that is refused


def test_optional_groups_are_those_outside_the_default_config(project):
    choices = validate(read(["fit", "--cfg", "job"])).hydra.runtime.choices
    assert set(GROUPS_TO_ADD).isdisjoint(choices)
    shipped = {folder.name for folder in packaged_conf().iterdir() if folder.is_dir()} - {"hydra"}
    assert shipped - set(GROUPS_TO_ADD) == {choice for choice in choices if not choice.startswith("hydra/")}
