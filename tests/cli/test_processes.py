from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from trainer.cli import main
from trainer.cli.arguments import Arguments, UsageError, read
from trainer.cli.compose import Composer
from trainer.cli.processes import clean_environment, imports_only, is_first
from trainer.cli.validate import validate
from trainer.cli.workdir import claim, quoted, resume_requeued_job
from trainer.record.run_record import load_run


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "TORCHELASTIC_RUN_ID", *SRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_first_process(monkeypatch, environment, first):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first() is first


def test_jobs_do_not_inherit_process_group_variables():
    leaks = ["LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED"]
    environment = dict.fromkeys([*leaks, "TORCHELASTIC_RUN_ID"], "1") | {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert clean_environment(environment) == {"HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "0"}


def test_run_claims_its_own_folder(project):
    arguments = [read(["fit", "+recipe=line"]) for _ in range(3)]
    config = validate(arguments[0])
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.run.dir = "outputs/line/now"  # all three in the same second
    folders = [claim(each, config) for each in arguments]
    assert [str(folder) for folder in folders] == ["outputs/line/now", "outputs/line/now_2", "outputs/line/now_3"]
    assert all(folder.is_dir() for folder in folders)
    assert arguments[1].overrides[-1] == "hydra.run.dir='outputs/line/now_2'"


SRUN = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


def slurm(monkeypatch, **more):
    for name, value in (SRUN | {"SLURM_PROCID": "0"} | more).items():
        monkeypatch.setenv(name, value)


def test_tasks_and_requeues_of_a_slurm_job_share_one_folder(project, monkeypatch):
    folders = []
    for rank, restarts in (("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")):
        slurm(monkeypatch, SLURM_PROCID=rank, SLURM_RESTART_COUNT=restarts)
        arguments = read(["fit", "+recipe=line"])
        resume_requeued_job(arguments)
        assert ("resume=auto" in arguments.overrides) is (restarts == "1")
        folders.append(claim(arguments, validate(arguments)).as_posix())
    assert len(set(folders)) == 1
    assert folders[0].startswith("outputs/line/slurm-17.0-")


def test_command_repeated_in_a_job_has_its_own_folder(project, monkeypatch):
    slurm(monkeypatch, SLURM_NTASKS="1", SLURM_RESTART_COUNT="")  # `srun --pty bash`
    folders = []
    for _ in range(2):
        arguments = read(["fit", "+recipe=line"])
        resume_requeued_job(arguments)
        folders.append(claim(arguments, validate(arguments)))
    assert len(set(folders)) == 2


def test_explicit_checkpoint_of_a_job_has_precedence(project, monkeypatch):
    slurm(monkeypatch, SLURM_RESTART_COUNT="1")
    for words in (["resume=null"], ["ckpt_path=last"], ["-m", "seed=1,2"]):
        arguments = read(["fit", "+recipe=line", *words])
        before = list(arguments.overrides)
        resume_requeued_job(arguments)
        assert arguments.overrides == before
    arguments = read(["fit", "+recipe=line", "resume=auto"])  # found by a resubmitted job, too
    assert claim(arguments, validate(arguments)).name.startswith("auto-")


@pytest.mark.parametrize("environment", [SRUN | {"SLURM_PROCID": "0"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_sweep_under_srun_or_torchrun_is_refused(project, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = read(["fit", "+recipe=line", "-m", "seed=1,2"])
    with pytest.raises(UsageError, match="torchrun or srun"):
        claim(arguments, validate(arguments))


def test_run_is_named_after_its_recipe(project):
    def folder(*words):
        arguments = read(["fit", "+recipe=line", *words])
        return claim(arguments, validate(arguments))

    assert folder().parent.as_posix() == "outputs/line"
    assert folder("+name=lines").parent.as_posix() == "outputs/lines"
    assert folder("-m", "seed=1,2").parent.as_posix() == "multirun/line"
    for _ in range(2):
        assert folder("hydra.run.dir=mine").as_posix() == "mine"


def test_another_rank_makes_no_folder_and_writes_no_config(project, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    arguments = read(["fit", "+recipe=line", "hydra.run.dir=given"])
    claim(arguments, validate(arguments))
    assert not (project / "given").exists()
    assert arguments.overrides[-3:] == ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra.run.dir='given'"]


@pytest.mark.parametrize("name", ["with space", "it's", 'a "b"', "a,b=c", r"C:\it's\here", "${now:%Y}", "äö"])
def test_any_folder_name_survives_hydra(name):
    (override,) = Composer(Arguments()).parse([f"hydra.run.dir={quoted(name)}"])
    assert OmegaConf.create({"name": override.value()}).name == name


@pytest.mark.whole
def test_one_process_reports_a_failure_of_all(project, python):
    settings = ["model.fail_at=1", "trainer.devices=2", "trainer.strategy=ddp", "logger=none"]
    done = python.trainer("fit", "+recipe=line", *settings)
    assert done.returncode == 1
    assert done.stderr.count("trainer: RuntimeError: asked to fail\n") == 1
    assert "Traceback" not in done.stderr
    (folder,) = Path("outputs/line").iterdir()  # of both
    for name in ("fit.log", "fit_rank_1.log"):
        assert "RuntimeError: asked to fail" in (folder / name).read_text()
    assert load_run(folder).status == "failed"


def test_run_is_composed_once_and_its_environment_collected_once(project, monkeypatch):
    composed, collected = [], []
    monkeypatch.setattr("trainer.record.provenance._git", lambda: collected.append(1))
    compose = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_configuration", lambda *given, **more: composed.append(1) or compose(*given, **more)
    )
    assert main(["fit", "+recipe=line", "hydra.run.dir=here"]) == 0
    assert (len(composed), len(collected)) == (1, 1)
    written = OmegaConf.load("here/.hydra/hydra.yaml").hydra
    assert (written.run.dir, written.mode) == ("here", "RUN")
    assert written.overrides.hydra[-1] == "hydra.run.dir='here'"


def test_no_garbage_is_collected_while_torch_is_imported(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.setattr(atexit, "register", lambda function: frozen.append(function))
    with imports_only():
        assert gc.isenabled()  # torch is imported already
    assert frozen == []
    monkeypatch.delitem(sys.modules, "torch")
    with imports_only():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False, gc.unfreeze]
