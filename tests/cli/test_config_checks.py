"""Mistakes on the command line or in a config: status 2, the given value, the nearest valid name, and a remedy."""

import os
import re
import shlex
import signal
import subprocess
import sys

import hydra
import pytest
from packaging.version import Version

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.config_checks import validate
from trainer.cli.parsing import UsageError, read


def complaint(argv, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trainer: ")
    assert err.count("\n") == 1  # one paragraph, no traceback
    return err


COMMANDS = {
    "+recipe=line": "No command given, expected one of checks, compare, consolidate,",
    "fit": "There is no model to fit. Choose a recipe,",
    "fit +recipe=line --config-dir nowhere": "--config-dir is nowhere, expected a folder that exists.",
    "fit +recipe=resnet50 data=imagefolder": "data.root has no value. Set it: data.root=VALUE.",
    "fit -m +recipe=line,lin": "Config group 'recipe' has no option 'lin'.",
    "fit +recipe=line +recipe=other": "Multiple values for recipe. To choose an option in a config file, write",
    "test ckpt=": "ckpt is empty, expected a checkpoint, or the folder of a run.",
    "tune lr ckpt=line_fit.py": "Got ckpt=line_fit.py with tune, which does not resume.",
    "checks +recipe=line ckpt=outputs": "replace it by +recipe=NAME weights=outputs.",
    "compare": "There is no model to compare. Choose a recipe, `python -m trainer compare +recipe=",
    "compare +recipe=line precision=16": "Got 1 run to compare, expected at least 2.",
    "compare +recipe=line +compare.min_spedup=2": "no setting 'compare.min_spedup'. Did you mean 'min_speedup'?",
    "compare +recipe=line compare.mode=best": "compare.mode is best, expected max, min or null.",
    "compare +recipe=line --cfg job": "Got compare and --cfg",
    "tune": "Got nothing to tune, expected batch_size, for the largest batch that fits into memory",
    "tune batchsize +recipe=line": "Got batchsize, expected batch_size, for the largest batch that",
    "tune lr +recipe=line precision=16,32": "precision=16-mixed,32-true has several values",
    "checks jsn": "Got 'jsn'. Did you mean 'json'?",
    "checks +recipe=gpt checks.gpu_memory=much": "checks.gpu_memory is much, expected a size such as 3GiB",
    "recipes copy": "recipes copy NAME [NEWNAME]",
    "recipes copy line ../x": "as the name of a recipe, expected",
    "recipes line other": "Got the recipes line and other, expected one",
}
TUNE = {
    "tune.memory=lots": "tune.memory is lots, expected a size such as 3GiB",
    "tune.max_lr=1e-8": "tune.max_lr is 1e-08, expected more than tune.min_lr, which is 1e-06.",
    "tune.batch_size_key=model.size": "model.size is null, expected a whole number. tune.batch_size_key names",
    "tune.batch_size_key=model.start": "model.start is 0.0, expected a whole number.",
    "data.batch_size=4,8": "data.batch_size=4,8 has several values, expected one. To run one job for each",
    "-m": "Got --multirun with tune, which does not support it.",
}
LINE = {
    # options
    "precision=16-mixd": "has no option '16-mixd'. Did you mean '16-mixed'?",
    "optimizer=foo": "has no option 'foo'. Choose one of: adam, adamw, muon, sgd.",
    "logger=false": "has no option 'false'. Choose one of: csv,",
    # settings
    "+trainer.foo=3": "There is no setting 'trainer.foo'.\n",
    "trainer.precision=16": "Did you mean 'precision'?",
    "+callbacks.scale_moniter.patience=1": "callbacks.scale_moniter has no _target_. Did you mean 'scale_",
    "output_dir=x": "Did you mean 'hydra.run.dir'?",
    "model.optimizer.lr=1": "set optimizer.lr instead of model.optimizer.lr",
    "+model.optimizer.extra=1": "set +optimizer.extra instead of +model.optimizer.extra",
    # Hydra
    "'optimizer.lr=a b:{'": "Cannot parse the setting 'optimizer.lr=a b:{'",
    "'model.start=range(a,b)'": "start: str is incompatible with Union[int, float]. A value",
    "'model.start=f(x)'": "Unknown function 'f'. A value with spaces, commas,",
    "hydra.sweep.dir=a": "hydra.sweep.dir=a has no effect on a single run. Add -m.",
    "trainer.max_epochs='${oc.env:NO_EPOCHS,\"3\"}'": "To convert one, use ${oc.decode:${oc.env:NAME}}.",
    "trainer.benchmark='${oc.env:NO_BENCHMARK,\"true\"}'": "Environment variables are text.",
    "'model.start=${data.strat}'": "model.start: Interpolation key 'data.strat' not found.",
    "'model.start=${half:3}'": "in ./hydra_plugins: OmegaConf.register_new_resolver('half', FUNCTION).",
    "hydra.run.dir=line_fit.py": "Cannot write to line_fit.py: it is a file, expected a folder.",
    "hydra.run.dir=/proc/nowhere/run": "Cannot create the folder /proc/nowhere/run:",
    # sweeps
    "-m seed=1,2 hydra.run.dir=a": "hydra.run.dir=a has no effect on a sweep. Use hydra.sweep.dir instead.",
    "-m seed=1,2 optimizer.lr=1,2 'hydra.sweep.subdir=a/${seed}'": "is a/${seed}, which is a/1 for several jobs,",
    "-m optimizer=sgd,adam optimizer.momentum=0.5": "no setting 'optimizer.momentum'",
    "objective.mode=mix": "objective.mode is mix, expected min, max or null. Did you mean 'min'?",
    "objective=val_loss": "objective is val_loss, expected a node with the settings metric, mode.",
}
MISTAKES = COMMANDS | {f"fit +recipe=line {words}": message for words, message in LINE.items()}
MISTAKES |= {f"tune batch_size +recipe=line {words}": message for words, message in TUNE.items()}


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_mistakes_on_the_command_line(project, capsys, words, message):
    before = sorted(project.rglob("*"))
    assert message in complaint(shlex.split(words), capsys)
    assert [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts] == before


REMEDIES = [
    ("epochs=3", "Did you mean 'trainer.max_epochs'?", "trainer.max_epochs=3"),
    ("+callback=none", "Did you mean 'callbacks'?", "callbacks=none"),
    ("data.shuffle=true", "write +data.shuffle=true.", "+data.shuffle=true"),
    ("+optimizer.lr=3", "remove + prefix: 'optimizer.lr=3'", "optimizer.lr=3"),
    ("seed=1,2", "has several values, expected one. To run one job for each value, add -m.", "-m seed=1,2"),
    ("precision=[32,16]", "use -m precision=32-true,16-mixed", "-m precision=32-true,16-mixed"),
    ("~trainer.max_epochs", "Use trainer.max_epochs=null", "trainer.max_epochs=null"),
    ("optimizer=torch.optim.Adam", "optimizer._target_=torch.optim.Adam.", "optimizer._target_=torch.optim.Adam"),
    ("+model.a=größe", """If it is a text: '+model.a="größe"'""", '+model.a="größe"'),
    ("+data.a=#1", """If it is a text: '+data.a="#1"'""", '+data.a="#1"'),
    pytest.param(
        "~model.fail_at",
        "Give it a value first: model.fail_at=0 ~model.fail_at",
        "model.fail_at=0 ~model.fail_at",
        marks=pytest.mark.skipif(Version(hydra.__version__) >= Version("1.4.0rc0"), reason="Hydra 1.4 deletes it"),
    ),
    ("+recipe=conf/recipe/other.yaml", "Did you mean 'other'?", ""),
    ("-m seed=1,2 hydra.sweep.subdir=a", "Add ${hydra:job.num}", "-m seed=1,2 hydra.sweep.subdir=a${hydra:job.num}"),
    ("-m model.start=interval(0,1)", "Add hydra/sweeper=optuna", "-m hydra/sweeper=optuna model.start=interval(0,1)"),
]


@pytest.mark.parametrize(("words", "message", "corrected"), REMEDIES)
def test_settings_that_an_error_advises_are_accepted(project, words, message, corrected):
    with pytest.raises(UsageError) as caught:
        validate(read(["fit", "+recipe=line", *words.split()]))
    assert message in str(caught.value)
    validate(read(["fit", "+recipe=line", *corrected.split()]))


def test_missing_recipe_names_those_there_are(project, capsys):
    message = complaint(["test"], capsys)
    assert "`python -m trainer test +recipe=NAME`" in message
    assert "`python -m trainer test ckpt=RUN_FOLDER`" in message
    for name in ("line", "other", "resnet50"):
        assert f" {name}," in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_epoch: 3}", "conf/recipe/bad.yaml: There is no setting 'trainer.max_epoch'. Did you mean"),
        ("trainer: {max_epochs: ten}", "trainer.max_epochs is ten, expected a whole number or null."),
        ("defaults: [line]\ntrainr: {max_epochs: 3}", "There is no setting 'trainr'. Did you mean 'trainer'?"),
        ("defaults: [line]\nlogger: {cvs: {name: a}}", "logger.cvs has no _target_. Did you mean 'csv'?"),
        ("seed: 3", "There is no model to fit. With +recipe=bad, model is null."),
        ("defaults: line", "Invalid defaults list in 'recipe/bad', defaults must be a list (got str)."),
        ("defaults: [line]\ntrainer: {precision: 16}", "write `- override /GROUP: OPTION`"),
        (
            "defaults: [line]\nlogger: csv",
            "logger is csv, expected a node with a _target_, the dotted name of a class, or null. To",
        ),
        ("defaults: [line]\noptimizer:\n  lr:0.7", "optimizer is lr:0.7, expected a node with a _target_"),
        ("defaults: [line]\ncallbacks: [ema]", "In 'recipe/bad': ConfigTypeError raised while composing config"),
        ("defaults: [line]\nhydra: {run: {dir: 'a/${nme}'}}", "hydra.run.dir: Interpolation key 'nme' not found."),
    ],
)
def test_mistakes_in_a_file(project, capsys, text, message):
    write(project, {"conf/recipe/bad.yaml": f"# @package _global_\n{text}\n"})
    assert message in complaint(["fit", "+recipe=bad"], capsys)


@pytest.mark.parametrize(
    ("default", "message", "corrected"),
    [
        ("/optimizer: adam", "Multiple values for optimizer. To choose", "override /optimizer: adam"),
        ("optimizer: adam", "There is no config recipe/optimizer/adam. To choose", "override /optimizer: adam"),
        ("override optimizer: adam", "write `- override /GROUP: OPTION`", "override /optimizer: adam"),
        ("override /optimiser: adam", "Did you mean 'optimizer'?", "override /optimizer: adam"),
        ("recipe/other", "or `- OPTION` for another file of the same group", "other"),
    ],
)
def test_corrections_of_a_defaults_list_are_accepted(project, default, message, corrected):
    write(project, {"conf/recipe/bad.yaml": f"# @package _global_\ndefaults:\n  - line\n  - {default}\n"})
    with pytest.raises(UsageError, match=re.escape(message)):
        validate(read(["fit", "+recipe=bad"]))
    write(project, {"conf/recipe/bad.yaml": f"# @package _global_\ndefaults:\n  - line\n  - {corrected}\n"})
    validate(read(["fit", "+recipe=bad"]))


def test_files_that_are_not_options_are_named(project, capsys):
    recipe = {"conf/recipe/bad.yaml": "model: {_target_: line_fit.Line}\n"}
    write(project, recipe | {"conf/recipe/sub/deep.yaml": ""})
    for name, message in {
        "deep": "Did you mean 'sub/deep'?",
        "bad": "Add `# @package _global_` as its first line.",
    }.items():
        assert message in complaint(["fit", f"+recipe={name}"], capsys)


def test_debug_settings_override_the_recipe_in_any_order(project):
    write(project, {"conf/debug/short.yaml": "# @package _global_\ntrainer: {max_epochs: 7}\n"})
    for words in (["+recipe=line", "+debug=short"], ["+debug=short", "+recipe=line"]):
        assert validate(read(["fit", *words])).trainer.max_epochs == 7
    assert validate(read(["fit", "+debug=short", "trainer.max_epochs=8", "+recipe=line"])).trainer.max_epochs == 8


def test_sweep_without_its_mode(project, capsys):
    write(project, {"conf/sweep/rates.yaml": "# @package _global_\nhydra: {sweeper: {params: {seed: '1,2'}}}\n"})
    message = complaint(["fit", "+recipe=line", "+sweep=rates"], capsys)
    assert "+sweep=rates has no effect on a single run. Add -m." in message
    assert validate(read(["fit", "-m", "+recipe=line", "+sweep=rates"])).seed == 1
    assert validate(read(["fit", "+recipe=line", "+sweep=rates", "hydra.mode=RUN"])).seed == 42  # a job


def test_options_in_other_folders(project):
    write(project, {"more/recipe/far.yaml": "# @package _global_\ndefaults: [line]\n"})
    assert validate(read(["fit", "+recipe=far", "hydra.searchpath=[file://more]"])).seed == 42


def test_wrong_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"There is no folder conf in {tmp_path}" in complaint(["fit", "+recipe=mine"], capsys)


@pytest.mark.parametrize(
    "text",
    [
        "trainr: {max_epochs: 3}\ntrainer: {max_epochs: '${trainr.max_epochs}'}",  # used: no mistake
        "callbacks: {throughput: {anything: 1}}\nnotes: {dates: [1]}\nname: mine",  # known, not chosen
        "lr: 0.3\noptimizer: {lr: '${lr}'}",  # used, until the command line overrides it
        "shared: {model_checkpoint: null}\ncallbacks: ${shared}",
    ],
)
def test_custom_keys_in_a_file(project, text):
    write(project, {"conf/recipe/good.yaml": f"# @package _global_\ndefaults: [line]\n{text}\n"})
    assert validate(read(["fit", "+recipe=good", "optimizer.lr=0.5"])).command == "fit"


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.devices='0,1'", "trainer.limit_train_batches=0.5", "trainer.fast_dev_run=3", "seed=null"],
        ["trainer.devices=[0,1]", "trainer.deterministic=warn", "trainer.max_epochs=null", "ckpt_path=last"],
        ["callbacks.model_checkpoint=null", "optimizer={lr: 1}", "++anything.at.all=1", "+data.more={a: [1]}"],
        ["callbacks=none", "+optimizer.maximize=true", "~optimizer.nesterov", "model.start=${optimizer.lr}"],
        ["callbacks=nonfinite_guard", "callbacks.nonfinite_guard.policy=go_on"],  # a deprecated value
        ["+hydra.job.env_set.START=3", "model.start='${oc.decode:${oc.env:START}}'"],
        ["hydra.job.name=a", "hydra.verbose=[a,b]", "hydra.run.dir='my runs/${now:%Y}'", "model.fail_at=3"],
        ["trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy}", "trainer._target_=lightning.Trainer"],
    ],
)
def test_values_that_are_fine(project, settings):
    assert validate(read(["fit", "+recipe=line", *settings])).command == "fit"


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there are no such pipes")
def test_closed_pipe_of_a_help_is_not_an_error(project):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "trainer", "fit", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
