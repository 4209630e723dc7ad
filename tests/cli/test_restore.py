"""``ckpt=RUN`` restores the config of a run with its checkpoint."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.cli.conftest import write
from trainer.cli import main, restore
from trainer.cli.config_checks import validate
from trainer.cli.parsing import UsageError, read
from trainer.cli.report.selection import choose_subject
from trainer.cli.workdir import claim
from trainer.record.find_checkpoint import checkpoints_in, find
from trainer.record.run_record import load_run, read_json

pytestmark = [pytest.mark.usefixtures("project"), pytest.mark.filterwarnings("default")]


SETTINGS = ["seed=7", "data.batch_size=2", "model.start=0.5", "optimizer.lr=0.25", "trainer.max_epochs=3"]
OPTIONS = ["precision=16", "callbacks=none", "logger=none", "resume=auto"]


@cache
def config():
    """Return the config of an old run, in which some settings did not exist."""
    composed = OmegaConf.to_container(validate(read(["fit", "+recipe=line", *SETTINGS, *OPTIONS])))
    old = {name: value for name, value in composed.items() if name not in ("hydra", "objective", "checks")}
    return old | {"ckpt_path": "old.ckpt"}


@pytest.fixture
def run(project):
    """A run's folder with empty checkpoints."""
    folder = Path("outputs/line/then")
    record = {"recipe": "line", "paths": {"best_checkpoint": "/x/checkpoints/epoch=1-step=8.ckpt"}}
    write(folder, {".hydra/config.yaml": yaml.safe_dump(config()), "run.json": json.dumps(record)})
    write(folder / "checkpoints", dict.fromkeys(["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"], ""))
    return folder


def composed(*argv):
    arguments = read(argv)
    restore.apply(arguments)
    return validate(arguments)


def test_config_of_the_run_is_restored(run):
    config = composed("test", f"ckpt={run}")
    assert (config.command, config.seed, config.data.batch_size, config.trainer.max_epochs) == ("test", 7, 2, 3)
    assert (config.model.start, config.model.optimizer.lr, config.precision.dtype) == (0.5, 0.25, "float16")
    assert config.ckpt_path == str(run / "checkpoints" / "epoch=1-step=8.ckpt")
    assert (config.resume, config.checks.devices) == (None, None)  # a command's settings are not the run's
    assert config.objective == {"metric": None, "mode": None}  # new since then
    assert "scale_monitor" not in config.callbacks
    assert str(config.hydra.run.dir).startswith("outputs/line/")


def test_interpolations_have_the_job_and_the_options_of_the_run(run):
    saved = {"job": {"num": 3, "id": "3"}, "runtime": {"choices": {"data": "points", "optimizer": "sgd"}}}
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": saved}), encoding="utf-8")
    keys = ["job.num", "job.id", *(f"runtime.choices.{group}" for group in ("recipe", "data", "optimizer"))]
    written = changed(notes={"kept": [f"${{hydra:{key}}}" for key in keys]})
    (run / ".hydra" / "config.yaml").write_text(written, encoding="utf-8")
    config = composed("test", f"ckpt={run}", "optimizer=adam")
    assert list(config.notes.kept) == [3, "3", "line", "points", "adam"]
    assert str(config.hydra.run.dir).startswith("outputs/line/")


@pytest.mark.parametrize("words", [["ckpt={}"], ["+recipe=line", "ckpt_path={}/checkpoints/last.ckpt"]])
def test_settings_that_the_checkpoint_replaces_are_refused(run, words):
    words = [word.format(run) for word in words]
    for same in ("optimizer.lr=0.25", "++optimizer.fused=true", "model.start=1"):
        assert composed("fit", *words, same).command == "fit"
    message = r"optimizer.lr=0.5 has no effect, because .* continues with lr=0.25.* \+recipe=line weights="
    for new in (["optimizer.lr=0.5"], ["-m", "optimizer.lr=0.25,0.5"]):
        with pytest.raises(UsageError, match=message):
            composed("fit", *words, *new)
    assert composed("test", *words, "optimizer.lr=0.5").optimizer.lr == 0.5


def test_settings_that_the_checkpoints_of_the_own_folder_replace_are_refused(run):
    words = ["+recipe=line", "resume=auto", f"hydra.run.dir={run}"]
    assert composed("fit", *words, "optimizer.lr=0.25").optimizer.lr == 0.25
    with pytest.raises(UsageError, match=r"lr=0.5 has no effect, .* replace resume=auto and its folder by .*weights="):
        composed("fit", *words, "optimizer.lr=0.5")
    shutil.rmtree(run / "checkpoints")  # nothing to resume from
    assert composed("fit", *words, "optimizer.lr=0.5").optimizer.lr == 0.5


def test_interpolated_setting_that_the_checkpoint_replaces_is_refused(run):
    written = changed(notes={"rate": 0.25}, optimizer={"lr": "${notes.rate}"})
    (run / ".hydra" / "config.yaml").write_text(written, encoding="utf-8")
    assert composed("fit", f"ckpt={run}", "optimizer.lr=0.25").optimizer.lr == 0.25
    for setting in ("notes.rate=0.5", "optimizer.lr=0.5"):
        with pytest.raises(UsageError, match=r"optimizer.lr=0.5 has no effect, because .* continues with lr=0.25"):
            composed("fit", f"ckpt={run}", setting)


def test_null_is_no_checkpoint(run):
    assert composed("fit", "+recipe=line", "ckpt=null").ckpt is None


def test_overrides_and_other_options_still_apply(run):
    settings = ["data.batch_size=8", "precision=bf16", "optimizer=adam", "trainer.max_epochs=1", "+debug=limit"]
    config = composed("validate", f"ckpt={run}", *settings)
    assert config.data.batch_size == 8
    assert config.precision == {**config.precision, "dtype": "bfloat16", "loss_scaling": False}
    assert config.optimizer._target_ == "torch.optim.Adam"
    assert "nesterov" not in config.optimizer
    assert (config.trainer.max_epochs, config.trainer.limit_val_batches) == (1, 3)
    assert config.model.start == 0.5
    assert composed("test", f"ckpt={run}", "logger=none").logger == {}


def test_options_of_nested_groups_and_other_packages_replace_their_nodes(run, project):
    write(project, {"conf/model/net/small.yaml": "width: 1", "conf/model/net/deep.yaml": "depth: 2"})
    nodes = changed(model={"net": {"width": 3}}, second={"_target_": "torch.optim.SGD", "momentum": 0.5})
    (run / ".hydra" / "config.yaml").write_text(nodes, encoding="utf-8")
    config = composed("test", f"ckpt={run}", "model/net=deep", "optimizer@second=adam")
    assert (config.model.net, config.model.start) == ({"depth": 2}, 0.5)
    assert (config.second._target_, "momentum" in config.second) == ("torch.optim.Adam", False)
    assert config.optimizer.lr == 0.25


def test_unknown_keys_are_named(run):
    with pytest.raises(UsageError, match=r"no setting 'data.batchsize'. Did you mean 'data.batch_size'"):
        composed("test", f"ckpt={run}", "data.batchsize=3")


def test_selected_checkpoint(run):
    assert find(run).name == "epoch=1-step=8.ckpt"
    assert find(run / "checkpoints").name == "last.ckpt"  # no record here, and two to choose from
    assert find(run / "checkpoints/epoch=0-step=4.ckpt").name == "epoch=0-step=4.ckpt"
    assert find(run, latest=True).name == "last.ckpt"
    (run / "checkpoints" / "interrupted.ckpt").write_bytes(b"")
    assert (find(run, latest=True).name, find(run).name) == ("interrupted.ckpt", "epoch=1-step=8.ckpt")
    (run / "checkpoints" / "interrupted.ckpt").unlink()
    (run / "run.json").write_text("{")
    assert find(run).name == "last.ckpt"
    (run / "checkpoints" / "epoch=0-step=4.ckpt").unlink()
    assert find(run).name == "epoch=1-step=8.ckpt"  # the only one that is kept is the best


@pytest.mark.parametrize("folder", ["checkpoints", "kept"])
def test_best_checkpoint_may_be_in_another_folder(run, folder):  # of names such as {val/loss}, or of ModelCheckpoint
    (run / "checkpoints").rename(run / folder)
    for loss in (3, 4):
        write(run / folder / f"epoch={loss}-val", {"loss=0.25.ckpt": ""})
    best = f"{folder}/epoch=3-val/loss=0.25.ckpt"
    (run / "run.json").write_text(json.dumps({"recipe": "line", "paths": {"best_checkpoint": f"/moved/{best}"}}))
    assert find(run) == run / best
    assert find(run, latest=True).name == "loss=0.25.ckpt"


def test_parts_of_sharded_checkpoints_are_no_checkpoints(run):
    folder = run / "checkpoints"
    for file in folder.iterdir():
        file.unlink()
    write(folder, {"epoch=0-step=4.ckpt/manifest.json": "{}", "epoch=0-step=4.ckpt/state.ckpt": ""})
    write(folder, {".7-1f.ckpt-part/state.ckpt": ""})  # its process has been killed
    (run / "run.json").unlink()
    assert find(run) == find(run, latest=True) == folder / "epoch=0-step=4.ckpt"
    assert checkpoints_in(run) == [folder / "epoch=0-step=4.ckpt"]


MISTAKES = [
    (["test", "ckpt=outputs/line/them"], "there is no such file or folder. Did you mean 'then'?"),
    (["test", "ckpt=outputs"], "a folder without checkpoints."),
    (["test", "ckpt=outputs/line/then", "+recipe=line"], "and a recipe, another config"),
    (["test", "ckpt=outputs/line/then", "ckpt_path=x.ckpt"], "a recipe, another config or ckpt_path"),
    (["compare", "ckpt=outputs/line/then"], "Got ckpt with compare"),
    (["test", "ckpt=lonely.ckpt"], "+recipe=NAME ckpt_path=lonely.ckpt"),
    (["test", "ckpt=bare"], "+recipe=NAME ckpt_path=bare/checkpoints/last.ckpt"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_mistakes(run, argv, message, capsys):
    Path("lonely.ckpt").touch()
    write(Path("bare/checkpoints"), {"last.ckpt": ""})
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def changed(**changes):
    merged = {key: config().get(key, {}) | change for key, change in changes.items()}
    return yaml.safe_dump(config() | merged)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        *((text, "is damaged") for text in ("model: [", "- a\n- b\n", "trainer: 3\nmodel: null\n")),
        ({"no_such": 1}, "The config of that run: There is no setting 'trainer.no_such'"),
        ({"max_epochs": "ten"}, "trainer.max_epochs is ten, expected a whole number or null."),
    ],
)
def test_config_of_a_stranger_is_checked_like_any_other(run, written, message, capsys):
    text = written if isinstance(written, str) else changed(trainer=written)
    (run / ".hydra" / "config.yaml").write_text(text)
    assert main(["test", f"ckpt={run}"]) == 2
    assert message in capsys.readouterr().err


def test_sweep_names_the_classes_of_each_job(run):
    assert composed("fit", "-m", f"ckpt={run}", "model._target_=json.One,html.Two").model._target_ == "json.One"


def test_run_and_later_commands(project, capsys):
    settings = ["callbacks.learning_rate_monitor=null", "callbacks.model_checkpoint.monitor=val_loss"]
    settings += ["data.batch_size=2", "optimizer.lr=0.01", "precision=bf16"]
    assert main(["fit", "+recipe=line", *settings, "hydra.run.dir=first"]) == 0
    loss = read_json(Path("first"))["metrics"]["val_loss"]
    shutil.move("first", "outputs/moved")
    assert main(["validate", "ckpt=outputs/moved", "hydra.run.dir=validated"]) == 0
    assert read_json(Path("validated"))["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-3)
    assert (read_json(Path("validated"))["precision"], read_json(Path("validated"))["recipe"]) == ("bf16-mixed", "line")
    assert "the config of outputs/moved." in capsys.readouterr().out.replace("\\", "/")
    # the result is a run's folder, too; its checkpoint is the first one's
    assert main(["fit", "ckpt=outputs/moved", "trainer.max_epochs=4", "hydra.run.dir=on"]) == 0
    assert {"epochs": 4, "steps": 32, "recipe": "line"}.items() <= read_json(Path("on")).items()
    assert main(["test", "ckpt=on/checkpoints/last.ckpt", "precision=32", "-q", "hydra.run.dir=tested"]) == 0
    assert read_json(Path("tested"))["precision"] == "32-true"
    assert read_json(Path("tested"))["metrics"]["test_loss"] < loss


def test_compiled_run_is_resumed_with_and_without_compile(run):
    assert composed("fit", f"ckpt={run}", "compile=reduce-overhead").callbacks.compile.mode == "reduce-overhead"
    node = {"_target_": "trainer.callbacks.Compile", "mode": "max-autotune"}
    (run / ".hydra" / "config.yaml").write_text(changed(callbacks={"compile": node}), encoding="utf-8")
    assert composed("fit", f"ckpt={run}").callbacks.compile.mode == "max-autotune"
    assert composed("fit", f"ckpt={run}", "compile=none").callbacks.compile is None
    assert composed("fit", f"ckpt={run}", "compile=default").callbacks.compile.mode == "default"


@pytest.mark.whole
def test_an_evaluation_is_below_the_run_that_it_uses(given, monkeypatch, capsys):
    run = Path("given")
    assert main(["test", f"ckpt={run}"]) == 0
    (below,) = (run / "test").iterdir()
    assert load_run(below).command == "test"
    assert str(below) in capsys.readouterr().out
    assert load_run(run).paths["best_checkpoint"].endswith(find(run).relative_to(run).as_posix())
    assert load_run(run).status == "completed"
    assert choose_subject([str(run)]).runs == [run]
    assert choose_subject([str(run / "test")]).runs == [below]

    def folder(*argv):
        arguments = read(argv)
        restore.apply(arguments)
        return claim(arguments, validate(arguments))

    again = "test", f"ckpt={run}"
    assert folder("validate", f"ckpt={run}").parent == run / "validate"
    assert folder("predict", "+recipe=line", f"ckpt_path={run}/checkpoints/last.ckpt").parent == run / "predict"
    assert folder(*again).parent == below.parent
    assert folder(*again, "hydra.run.dir=there") == Path("there")  # a folder that the user chooses
    assert folder(*again, "+name=own").parent == Path("outputs/own")
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: path != run)
        assert folder(*again).parent == Path("outputs/line")  # the run of another user
    (run / "run.json").unlink()
    assert folder(*again).parent == Path("outputs/unnamed")  # of another program with Hydra
