"""``resume=auto`` on the command line: the same command resumes in the same folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.arguments import UsageError, read
from trainer.cli.validate import validate
from trainer.cli.workdir import claim

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

FIT = ["fit", "+recipe=line", "resume=auto"]
SHORT = ["callbacks.learning_rate_monitor=null", "callbacks.model_checkpoint.every_n_epochs=1"]


@pytest.fixture(autouse=True)
def alone(project, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def folder_of(*words: str) -> str:
    arguments = read(words)
    return str(claim(arguments, validate(arguments)))


def result(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.whole
def test_same_command_has_the_same_folder(capsys):
    folder = folder_of(*FIT, "optimizer.lr=0.1", "seed=3")
    assert Path(folder).parent == Path("outputs/line")
    assert Path(folder).name.startswith("auto-")
    assert f"resume=auto: using the folder {folder}\n" in capsys.readouterr().out
    same = ["fit", "seed=3", "recipe=line", "optimizer.lr=0.1", "exact_resume=false", "trainer.resume=auto"]
    assert folder_of(*same) == folder
    for other in (["seed=4", "optimizer.lr=0.1"], ["seed=3"], ["seed=3", "optimizer.lr=0.1", "trainer.max_epochs=3"]):
        assert folder_of(*FIT, *other) != folder
    assert Path(folder_of(*FIT, "+name=mine")).parent == Path("outputs/mine")
    assert folder_of(*FIT, "hydra.run.dir=here") == "here"


@pytest.mark.whole
def test_other_devices_keep_the_folder():
    folder = folder_of(*FIT)
    for other in (
        ["trainer=ddp"], ["++trainer.num_nodes=2"],
        ["trainer=fsdp", "trainer.devices=4", "trainer.strategy.replicas=2"],
        ["trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"],
    ):  # fmt: skip
        assert folder_of(*FIT, *other) == folder, other
    assert folder_of(*FIT, "data.batch_size=2") != folder
    write(Path.cwd(), {"conf/trainer/mine.yaml": "defaults: [default]\nmax_epochs: 5\n"})
    assert folder_of(*FIT, "trainer=mine") != folder
    sweep = [*FIT, "-m", "seed=1,2"]
    assert folder_of(*sweep, "trainer.devices=1,2") != folder_of(*sweep)


def test_every_run_has_its_own_folder_without_resume():
    assert folder_of("fit", "+recipe=line") != folder_of("fit", "+recipe=line")


def test_sweep_keeps_its_folder():
    sweep = [*FIT, "-m", "seed=1,2"]
    folder = folder_of(*sweep)
    assert Path(folder).parent == Path("multirun/line")
    assert folder_of(*sweep) == folder
    assert folder_of(*FIT, "-m", "seed=1,3") != folder


def test_other_ranks_find_it_by_themselves(monkeypatch):
    folder = folder_of(*FIT)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert folder_of(*FIT) == folder


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["fit", "resume=aut"], "resume is aut, expected auto or null. Did you mean 'auto'?"),
        (["fit", "resume=true"], "resume is true, expected auto or null."),
        (["fit", "trainer.resume=atuo"], "trainer.resume is atuo, expected auto or null. Did you mean 'auto'?"),
        (["fit", "resum=auto"], "There is no setting 'resum'. Did you mean 'resume'?"),
        (["fit", "exact_resume=flase"], "exact_resume is flase, expected true or false"),
        (["test", "resume=auto"], "Got resume=auto with test, expected fit or compare"),
    ],
)
def test_mistakes(words, complaint):
    arguments = read([*words, "+recipe=line"])
    with pytest.raises(UsageError) as caught:
        claim(arguments, validate(arguments))
    assert complaint in str(caught.value)


def test_run_is_resumed_until_it_is_completed(capsys, monkeypatch):
    from trainer import Trainer

    words = [*FIT, *SHORT, "trainer.max_epochs=3"]
    assert main(["fit", "+recipe=line", *SHORT, "trainer.max_epochs=3", "hydra.run.dir=whole"]) == 0

    def stop(self, *_, original=Trainer.save_checkpoint, saves=[]) -> None:  # noqa: B006
        saves.append(original(self, *_))
        if len(saves) == 3:  # of the first epoch's two, and the second's two
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save_checkpoint", stop)
        assert main(words) == 130
    (folder,) = Path("outputs/line").iterdir()
    assert result(folder)["status"] == "interrupted"
    capsys.readouterr()
    assert main(words) == 0
    assert re.search(r"checkpoint at \S+\.ckpt: epoch 2, step 8", "".join(capsys.readouterr()))
    resumed, whole = result(folder), result(Path("whole"))
    assert (resumed["status"], resumed["epochs"], resumed["steps"]) == ("completed", 3, 12)
    assert resumed["metrics"] == whole["metrics"]
    for name in ("csv/metrics.csv", "checkpoints"):
        ours, theirs = folder / name, Path("whole") / name
        if ours.is_file():
            assert ours.read_text() == theirs.read_text()
    assert "resuming from" in (folder / "fit.log").read_text()
    assert main(words) == 0
    assert result(folder) == resumed
    assert "Nothing to do: the run has already trained 12 optimizer steps" in "".join(capsys.readouterr())
    assert [path.name for path in Path("outputs/line").iterdir()] == [folder.name]


@pytest.mark.whole
def test_run_is_resumed_on_two_processes(python, project, monkeypatch):
    from trainer import Trainer

    words = [*FIT, *SHORT, "trainer.max_epochs=3", "trainer.accumulate_grad_batches=2"]
    assert main(["fit", *words[1:], "resume=null", "hydra.run.dir=whole"]) == 0

    def stop(self, *_, original=Trainer.save_checkpoint) -> None:
        original(self, *_)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save_checkpoint", stop)
        assert main(words) == 130
    again = python.trainer(*words, "trainer=ddp", "trainer.accelerator=cpu", cwd=project)
    assert again.returncode == 0, again.stderr
    (folder,) = Path("outputs/line").iterdir()
    resumed, whole = result(folder), result(Path("whole"))
    assert (resumed["status"], resumed["epochs"], resumed["steps"]) == ("completed", 3, 6)
    assert resumed["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)
    assert "resuming from" in (folder / "fit.log").read_text()


def test_refused_run_keeps_the_result_of_the_other(monkeypatch, capsys):
    from trainer.checkpoint import folder_locks as folders

    words = [*FIT, *SHORT, "logger=none", "trainer.max_epochs=1"]
    assert main(words) == 0
    (folder,) = Path("outputs/line").iterdir()
    record = result(folder)
    monkeypatch.setattr(folders, "_try_lock", lambda handle: False)
    assert main(words) == 1
    assert "in use by another run" in capsys.readouterr().err
    assert result(folder) == record
