"""``resume=auto`` on the command line: the same command resumes in the same folder."""

import re
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.config_checks import validate
from trainer.cli.parsing import read
from trainer.cli.workdir import claim
from trainer.record.run_record import read_json

pytestmark = [pytest.mark.usefixtures("project"), pytest.mark.filterwarnings("default")]

FIT = ["fit", "+recipe=line", "resume=auto"]
SHORT = ["callbacks.learning_rate_monitor=null", "callbacks.model_checkpoint.every_n_epochs=1"]


def folder_of(*words):
    arguments = read(words)
    return str(claim(arguments, validate(arguments)))


@pytest.mark.whole
def test_same_command_has_the_same_folder(capsys):
    folder = folder_of(*FIT, "optimizer.lr=0.1", "seed=3")
    assert Path(folder).parent == Path("outputs/line")
    assert Path(folder).name.startswith("auto-")
    assert f"resume=auto: using the folder {folder}\n" in capsys.readouterr().out
    same = ["fit", "seed=3", "recipe=line", "optimizer.lr=0.1", "exact_resume=false", "trainer.resume=auto"]
    assert folder_of(*same) == folder
    assert folder_of(*FIT, "seed=4", "optimizer.lr=0.1") != folder
    assert Path(folder_of(*FIT, "+name=mine")).parent == Path("outputs/mine")
    assert folder_of(*FIT, "hydra.run.dir=here") == "here"


@pytest.mark.whole
def test_other_devices_keep_the_folder():
    folder = folder_of(*FIT)
    for other in (["trainer=fsdp", "trainer.devices=4", "trainer.strategy.replicas=2"], ["++trainer.num_nodes=2"]):
        assert folder_of(*FIT, *other) == folder, other
    assert folder_of(*FIT, "data.batch_size=2") != folder
    write(Path.cwd(), {"conf/trainer/mine.yaml": "defaults: [default]\nmax_epochs: 5\n"})
    assert folder_of(*FIT, "trainer=mine") != folder
    sweep = folder_of(*FIT, "-m", "seed=1,2")
    assert Path(sweep).parent == Path("multirun/line")
    others = ["seed=1,2"], ["seed=1,3"], ["seed=1,2", "trainer.devices=1,2"]
    assert [folder_of(*FIT, "-m", *words) == sweep for words in others] == [True, False, False]


def test_other_ranks_find_it_by_themselves(monkeypatch):
    folder = folder_of(*FIT)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert folder_of(*FIT) == folder


def test_run_is_resumed_until_it_is_completed(capsys, monkeypatch):
    from trainer import Trainer

    words = [*FIT, *SHORT, "trainer.max_epochs=3"]
    assert main(["fit", "+recipe=line", *SHORT, "trainer.max_epochs=3", "hydra.run.dir=whole"]) == 0

    save, saves = Trainer.save_checkpoint, []

    def stop(self, *arguments):
        saves.append(save(self, *arguments))
        if len(saves) == 3:  # of the first epoch's two, and the second's two
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save_checkpoint", stop)
        assert main(words) == 130
    (folder,) = Path("outputs/line").iterdir()
    assert read_json(folder)["status"] == "interrupted"
    capsys.readouterr()
    assert main(words) == 0
    assert re.search(r"checkpoint at \S+\.ckpt: epoch 2, step 8", "".join(capsys.readouterr()))
    resumed, whole = read_json(folder), read_json(Path("whole"))
    assert (resumed["status"], resumed["epochs"], resumed["steps"]) == ("completed", 3, 12)
    assert resumed["metrics"] == whole["metrics"]
    assert (folder / "csv/metrics.csv").read_text() == Path("whole/csv/metrics.csv").read_text()
    assert "resuming from" in (folder / "fit.log").read_text()
    assert main(words) == 0
    assert read_json(folder) == resumed
    assert "Nothing to do: the run has already trained 12 optimizer steps" in "".join(capsys.readouterr())
    assert [path.name for path in Path("outputs/line").iterdir()] == [folder.name]


def test_refused_run_keeps_the_result_of_the_other(monkeypatch, capsys):
    from trainer.checkpoint import folder_locks as folders

    words = [*FIT, *SHORT, "logger=none", "trainer.max_epochs=1"]
    assert main(words) == 0
    (folder,) = Path("outputs/line").iterdir()
    record = read_json(folder)
    monkeypatch.setattr(folders, "_try_lock", lambda handle: False)
    assert main(words) == 1
    assert "in use by another run" in capsys.readouterr().err
    assert read_json(folder) == record
