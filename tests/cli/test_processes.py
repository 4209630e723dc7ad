from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.cli.compose import Composer
from trainer.cli.config_checks import validate
from trainer.cli.parsing import Arguments, UsageError, read
from trainer.cli.processes import clean_environment, is_first
from trainer.cli.workdir import claim, quoted, resume_requeued_job
from trainer.record.run_record import load_run


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "TORCHELASTIC_RUN_ID", *SRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("names", "ranks", "first"),
    [
        ("", "", True),
        ("RANK LOCAL_RANK", "0 0", True),
        ("RANK LOCAL_RANK", "2 0", False),
        ("LOCAL_RANK", "1", False),
        ("LOCAL_RANK NODE_RANK", "0 1", False),
        ("SLURM_PROCID", "3", False),
    ],
)
def test_first_process(monkeypatch, names, ranks, first):
    for name, rank in zip(names.split(), ranks.split(), strict=True):
        monkeypatch.setenv(name, rank)
    assert is_first() is first


def test_jobs_do_not_inherit_process_group_variables():
    leaks = "LOCAL_RANK RANK WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK PL_GLOBAL_SEED TORCHELASTIC_RUN_ID"
    kept = {"HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "0"}
    assert clean_environment(dict.fromkeys(leaks.split(), "1") | kept) == kept


def test_run_claims_its_own_folder(project):
    config = validate(read(["fit", "+recipe=line"]))
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.run.dir = "outputs/line/now"  # all three in the same second
    arguments = [read(["fit", "+recipe=line"]) for _ in range(3)]
    assert [str(claim(each, config)) for each in arguments] == [f"outputs/line/now{end}" for end in ("", "_2", "_3")]
    assert arguments[1].overrides[-1] == "hydra.run.dir='outputs/line/now_2'"


def claimed(*words):
    """Return the folder of a run, and its arguments."""
    arguments = read(["fit", "+recipe=line", *words])
    resume_requeued_job(arguments)
    return claim(arguments, validate(arguments)), arguments.overrides


SRUN = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


def slurm(monkeypatch, **more):
    for name, value in (SRUN | {"SLURM_PROCID": "0"} | more).items():
        monkeypatch.setenv(name, value)


def test_tasks_and_requeues_of_a_slurm_job_share_one_folder(project, monkeypatch):
    folders = set()
    for rank, restarts in (("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")):
        slurm(monkeypatch, SLURM_PROCID=rank, SLURM_RESTART_COUNT=restarts)
        folder, overrides = claimed()
        assert ("resume=auto" in overrides) is (restarts == "1")
        folders.add(folder.as_posix())
    assert len(folders) == 1
    assert folders.pop().startswith("outputs/line/slurm-17.0-")


def test_command_repeated_in_a_job_has_its_own_folder(project, monkeypatch):
    slurm(monkeypatch, SLURM_NTASKS="1", SLURM_RESTART_COUNT="")  # `srun --pty bash`
    assert claimed()[0] != claimed()[0]


def test_explicit_checkpoint_of_a_job_has_precedence(project, monkeypatch):
    slurm(monkeypatch, SLURM_RESTART_COUNT="1")
    for words in (["resume=null"], ["ckpt_path=last"], ["-m", "seed=1,2"]):
        arguments = read(["fit", "+recipe=line", *words])
        before = list(arguments.overrides)
        resume_requeued_job(arguments)
        assert arguments.overrides == before
    assert claimed("resume=auto")[0].name.startswith("auto-")  # found by a resubmitted job, too


@pytest.mark.parametrize("environment", [SRUN | {"SLURM_PROCID": "0"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_sweep_under_srun_or_torchrun_is_refused(project, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun or srun"):
        claimed("-m", "seed=1,2")


def test_run_is_named_after_its_recipe(project):
    assert claimed()[0].parent.as_posix() == "outputs/line"
    assert claimed("+name=lines")[0].parent.as_posix() == "outputs/lines"
    assert claimed("-m", "seed=1,2")[0].parent.as_posix() == "multirun/line"
    for _ in range(2):
        assert claimed("hydra.run.dir=mine")[0].as_posix() == "mine"


def test_another_rank_makes_no_folder_and_writes_no_config(project, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder, overrides = claimed("hydra.run.dir=given")
    assert not folder.exists()
    assert overrides[-3:] == ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra.run.dir='given'"]


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
