"""Printed overrides have the values of the run that they were printed for."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from tests.cli.conftest import write
from trainer import redaction
from trainer.cli.arguments import Arguments
from trainer.cli.compose import Composer
from trainer.cli.overrides import with_values

WORDS = ["command=fit", "+recipe=line"]


@pytest.fixture(autouse=True)
def _no_secrets() -> Any:
    yield
    redaction.forget()
    HydraConfig.instance().cfg = None


def compose(words: list[str], number: int | None = None) -> Any:
    """Return the config of a run, or of a job with this number, which is then the current one of Hydra."""
    config = Composer(Arguments()).compose(words)
    with open_dict(config.hydra):
        config.hydra.runtime.output_dir = "folder"
        if number is not None:
            config.hydra.job.num, config.hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(config)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=${hydra:job.num}", "seed=3"),
        (r"seed=$\{hydra\:job.num\}", "seed=3"),
        ("optimizer.lr=${data.batch_size}", "optimizer.lr=4"),
        ("++model.more={a:${hydra:job.num},b:[1,'${data.batch_size}']}", "++model.more={a:3,b:[1,4]}"),
        ("seed=7", "seed=7"),
        ("+name='it is \\'quoted\\''", "+name='it is \\'quoted\\''"),
        ("~scheduler", "~scheduler"),
        (
            "trainer.default_root_dir=${hydra:runtime.output_dir}/x",
            "trainer.default_root_dir=${hydra:runtime.output_dir}/x",
        ),
        (
            "trainer.default_root_dir=${hydra:runtime.output_dir}/${hydra:job.num}",
            "trainer.default_root_dir='${hydra:runtime.output_dir}/3'",
        ),
        ("+token=${model.start}${oc.env:A_TOKEN}", "+token='0.0${oc.env:A_TOKEN}'"),
        ("+token=${oc.env:NOT_SET}", "+token=${oc.env:NOT_SET}"),
    ],
)
def test_override_has_the_value_of_its_run(
    project: Any, monkeypatch: pytest.MonkeyPatch, word: str, expected: str
) -> None:
    monkeypatch.setenv("A_TOKEN", "hunter2")
    config = compose([*WORDS, word], number=3)
    written = with_values([*WORDS, word], config)
    assert written == [*WORDS, expected]
    if "${hydra:runtime" in word or "NOT_SET" in word:
        return
    key = OverridesParser.create().parse_override(word).key_or_group
    before = OmegaConf.select(config, key)
    before = OmegaConf.to_container(before, resolve=True) if OmegaConf.is_config(before) else before
    after = OmegaConf.select(compose(written, number=9), key)
    assert after == before


def test_settings_of_files_that_depend_on_the_job_are_added(project: Any) -> None:
    text = (
        "# @package _global_\ndefaults: [line]\nseed: ${hydra:job.num}\nextra: {list: [a, '${hydra:job.id}'], x: 1}\n"
    )
    write(project, {"conf/recipe/numbered.yaml": text})
    words = ["+recipe=numbered", "trainer.max_epochs=3"]
    assert with_values(words, compose(words, number=2)) == [*words, "seed=2", "extra.list=[a,'2']"]
    words = ["+recipe=numbered", "seed=5", "++extra={list:[b]}"]
    assert with_values(words, compose(words, number=2)) == words
    assert with_values(WORDS, compose(WORDS, number=2)) == WORDS


def test_time_is_that_of_the_run(project: Any) -> None:
    words = [*WORDS, "seed=${now:%f}", "+name=at-${now:%H_%M_%S_%f}"]
    config = compose(words)
    seed, name = config.seed, config.name
    written = with_values(words, config)
    assert written[2:] == [f"seed='{seed}'", f"+name={name}"]
