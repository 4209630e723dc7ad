"""Mistakes on the command line or in a config: status 2, the given value, and the nearest valid one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.arguments import UsageError, read
from trainer.cli.commands import names
from trainer.cli.validate import validate

FIT = ["fit", "+recipe=line"]
COMPARE = ["compare", "+recipe=line"]


def complaint(argv, capsys) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trainer: ")
    assert err.count("\n") == 1  # one paragraph, no traceback
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fitt", "+recipe=line"], "Did you mean 'fit'?"),
        (["+recipe=line"], "No command given, expected one of checks, compare, consolidate,"),
        (["fit", "+recipe=lin"], "Config group 'recipe' has no option 'lin'. Did you mean 'line'?"),
        (["fit", "+recpie=line"], "There is no config group 'recpie'. Did you mean 'recipe'?"),
        (["fit"], "There is no model to fit. Choose a recipe, such as"),
        ([*FIT, "precision=16-mixd"], "has no option '16-mixd'. Did you mean '16-mixed'?"),
        ([*FIT, "precision=atuo"], "has no option 'atuo'. Did you mean 'auto'?"),
        ([*FIT, "precision=16", "precision.fp32_modules=head"], "precision.fp32_modules is head, expected a list"),
        ([*FIT, "+precision=16"], "precision is in the config already. Remove the +"),
        ([*FIT, "optimizer=adamm"], "Did you mean 'adam'?"),
        ([*FIT, "callbacks=[default,early_stoping]"], "Did you mean 'early_stopping'?"),
        ([*FIT, "optimizr=adam"], "There is no setting 'optimizr'. Did you mean 'optimizer'?"),
        ([*FIT, "trainer.max_epoch=3"], "Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "+trainer.max_epoch=3"], "has no argument 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "+trainer.foo=3"], "The Trainer has no argument 'trainer.foo'.\n"),
        (
            ["fit", "+model._target_=a.B", "model.rate=1"],
            "There is no setting 'model.rate'. To add a new setting, write +model.rate",
        ),
        ([*FIT, "model.qqqq=1"], "There is no setting 'model.qqqq'. To add a new setting, write +model.qqqq=1."),
        (
            [*FIT, "+callbacks.scale_moniter.patience=1"],
            "callbacks.scale_moniter has no _target_. Did you mean 'scale_",
        ),
        ([*FIT, "optimizer.lr="], "optimizer.lr is empty, expected a number"),
        ([*FIT, "+a=b=c"], "quotes or = needs its own quotes"),
        ([*FIT, "max_epochs=3"], "There is no setting 'max_epochs'. Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "lr=3"], "Did you mean 'optimizer.lr'?"),
        ([*FIT, "model.strat=1"], "Did you mean 'model.start'?"),
        ([*FIT, "optimizer=AdamW"], "Did you mean 'adamw'?"),
        ([*FIT, "epochs=3"], "Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "+trainer.epochs=3"], "Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "trainer.gpus=1"], "Did you mean 'trainer.devices'?"),
        ([*FIT, "clip=1"], "Did you mean 'trainer.gradient_clip_val'?"),
        ([*FIT, "optimizer.LR=1"], "Did you mean 'optimizer.lr'?"),
        ([*FIT, "trainer.MAX_EPOCHS=1"], "Did you mean 'trainer.max_epochs'?"),
        ([*FIT, "learning_rate=0.1"], "Did you mean 'optimizer.lr'?"),
        ([*FIT, "optimizer.learning_rate=0.1"], "Did you mean 'optimizer.lr'?"),
        (["fit", "+recipe=mlp", "batch_size=3"], "Did you mean 'data.batch_size'?"),
        ([*FIT, "callbacks.model_checkpoint.save_topk=1"], "'callbacks.model_checkpoint.save_top_k'?"),
        ([*FIT, "precision=16", "precision.init_scal=8"], "Did you mean 'precision.init_scale'?"),
        ([*FIT, "hydra.run.dri=x"], "Did you mean 'hydra.run.dir'?"),
        ([*FIT, "~model.strat"], "Did you mean 'model.start'?"),
        ([*FIT, "brightness=1"], "To add a new setting, write +brightness=1."),
        ([*FIT, "model.optimizer.lr=1"], "set optimizer.lr instead of model.optimizer.lr"),
        ([*FIT, "trainer.max_epochs=ten"], "trainer.max_epochs is ten, expected a whole number or null."),
        ([*FIT, "trainer.max_epochs=1.5"], "trainer.max_epochs is 1.5, expected a whole number or null."),
        ([*FIT, "trainer.benchmark=ture"], "expected true, false or null. Did you mean 'true'?"),
        ([*FIT, "trainer.limit_val_batches=x"], "is x, expected a whole number, a number or null."),
        ([*FIT, "trainer.accelerator=gpuu"], "Did you mean 'gpu'?"),
        ([*FIT, "trainer.strategy=dpp"], "expected auto, ddp, "),
        ([*FIT, "trainer.gradient_clip_algorithm=nrom"], "Did you mean 'norm'?"),
        ([*FIT, "trainer.profiler=simpel"], "Did you mean 'simple'?"),
        ([*FIT, "trainer.val_check_interval=10:00"], "a share of an epoch, a time such as 00:12:00:00"),
        ([*FIT, "trainer.val_check_interval={minute: 10}"], "Did you mean 'minutes'?"),
        ([*FIT, "trainer.max_time=5"], "trainer.max_time is 5, expected a time such as 00:12:00:00 (days, hours,"),
        ([*FIT, "trainer.barebones=ture"], "expected true or false. Did you mean 'true'?"),
        ([*FIT, "trainer.reload_dataloaders_every_n_epoch=1"], "Did you mean 'trainer.reload_dataloaders_every_n"),
        ([*FIT, "trainer.devices=aoto"], "Did you mean 'auto'?"),
        ([*FIT, "trainer.devices=1.5"], "trainer.devices is 1.5, expected a number of devices"),
        ([*FIT, "optimizer.lr=abc"], "optimizer.lr is abc, expected a number (default: 0.1)."),
        ([*FIT, "optimizer.nesterov=1"], "optimizer.nesterov is 1, expected true or false"),
        ([*FIT, "optimizer=adam", "optimizer.betas=0.9"], "optimizer.betas is 0.9, expected a list"),
        ([*FIT, "~model"], "There is no model to fit."),
        ([*FIT, "data=null"], "To use none, write ~data."),
        ([*FIT, "optimizer=foo"], "has no option 'foo'. Choose one of: adam, adamw, sgd."),
        (
            [*FIT, "precision=32,16"],
            "precision=32-true,16-mixed has several values, expected one. To run one job for each value, add -m",
        ),
        ([*FIT, "optimizer.lr=a b:{"], "Cannot parse the setting 'optimizer.lr=a b:{'"),
        ([*FIT, "ckpt_path=nowhere.ckpt"], "ckpt_path is nowhere.ckpt: there is no such file."),
        (
            ["fit", "+recipe=resnet50", "data=imagefolder"],
            "data.root has no value. Set it: data.root=VALUE.",
        ),
        ([*FIT, "model.start=${data.strat}"], "model.start: Interpolation key 'data.strat' not found."),
        ([*FIT, "trainer.precision=16"], "Did you mean 'precision'?"),
        ([*FIT, "hydra.run.dir=line_fit.py"], "Cannot write to line_fit.py: it is a file, expected a folder."),
        ([*FIT, "hydra.run.dir=/proc/nowhere/run"], "Cannot create the folder /proc/nowhere/run:"),
        ([*FIT, "--config-dir", "nowhere"], "--config-dir is nowhere, expected a folder that exists."),
        ([*FIT, "model._target_=torh.nn.Linear"], "Did you mean 'torch'?"),
        ([*FIT, "-m", "precision=32,15"], "Config group 'precision' has no option '15'."),
        ([*FIT, "-m", "+recipe=line,lin"], "Config group 'recipe' has no option 'lin'."),
        ([*FIT, "-m", "trainer.max_epochs=1,two"], "trainer.max_epochs is two"),
        ([*FIT, "-m", "optimizer.lr=0.1,0.2,x"], "optimizer.lr is x"),
        ([*FIT, "-m", "optimizer=sgd,adam", "optimizer.momentum=0.5"], "no setting 'optimizer.momentum'"),
        ([*FIT, "+sweep=precison"], "Did you mean 'precision'?"),
        (["comprae", "+recipe=line"], "Did you mean 'compare'?"),
        (["compare"], "There is no model to compare. Choose a recipe, such as `python -m trainer compare +recipe="),
        ([*COMPARE, "precision=32,15"], "Config group 'precision' has no option '15'."),
        ([*COMPARE, "precision=16"], "Got 1 run to compare, expected at least 2."),
        ([*COMPARE, "+precision=16,32"], "Remove the +"),
        ([*COMPARE, "seed=null"], "seed is null, expected a number"),
        ([*COMPARE, "compare.min_spedup=2"], "Did you mean 'compare.min_speedup'?"),
        ([*COMPARE, "+compare.min_spedup=2"], "no setting 'compare.min_spedup'. Did you mean 'min_speedup'?"),
        ([*COMPARE, "compare.min_speedup=fast"], "is fast, expected a number, auto or null."),
        ([*COMPARE, "compare.min_memory_saving=-1"], "compare.min_memory_saving is -1, expected at least 0."),
        ([*COMPARE, "compare.accuracy_tolerance=x"], "accuracy_tolerance is x, expected a number"),
        ([*COMPARE, "compare.accuracy_tolerance=-1"], "compare.accuracy_tolerance is -1, expected at least 0."),
        ([*COMPARE, "compare.mode=up"], "compare.mode is up, expected max, min or null."),
        ([*COMPARE, "compare.metric=3"], "compare.metric is 3, expected the name of a metric or null."),
        ([*COMPARE, "compare.strict=1"], "compare.strict is 1, expected true or false"),
        ([*COMPARE, "--cfg", "job"], "Got compare with --cfg"),
    ],
)
def test_mistakes_on_the_command_line(project, capsys, argv, message):
    assert message in complaint(argv, capsys)
    assert not (project / "outputs").exists()
    assert not (project / "multirun").exists()


def test_missing_recipe_names_those_there_are(project, capsys):
    message = complaint(["test"], capsys)
    assert "`python -m trainer test +recipe=line`" in message
    assert "`python -m trainer test ckpt=RUN_FOLDER`" in message
    for name in ("line", "other", "resnet50"):
        assert f" {name}," in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer: {max_epoch: 3}",
            "conf/recipe/bad.yaml: There is no setting 'trainer.max_epoch'. Did you mean",
        ),
        (
            "trainer: {max_epochs: ten}",
            "conf/recipe/bad.yaml: trainer.max_epochs is ten, expected a whole number",
        ),
        ("a: [1", "A config file is not valid YAML"),
        ("defaults: [override /model: lien]", "has no option 'lien'. Did you mean 'line'?"),
        ("defaults: [override /modle: line]", "modle"),
        ("defaults: [line]\ntrainr: {max_epochs: 3}", "There is no setting 'trainr'. Did you mean 'trainer'?"),
        ("defaults: [line]\nmax_epochs: 3", "There is no setting 'max_epochs'. Did you mean 'trainer.max_epochs'?"),
        ("defaults: [line]\nlogger: {cvs: {name: a}}", "logger.cvs has no _target_. Did you mean 'csv'?"),
        ("seed: 3", "There is no model to fit. With +recipe=bad, model is null."),
    ],
)
def test_mistakes_in_a_file(project, capsys, text, message):
    write(project, {"conf/recipe/bad.yaml": f"# @package _global_\n{text}\n"})
    assert message in complaint(["fit", "+recipe=bad"], capsys)


def test_recipe_without_its_first_line(project, capsys):
    write(project, {"conf/recipe/bad.yaml": "model: {_target_: line_fit.Line}\n"})
    message = complaint(["fit", "+recipe=bad"], capsys)
    assert "conf/recipe/bad.yaml has no effect" in message
    assert "`# @package _global_`" in message


@pytest.mark.parametrize(
    "text",
    [
        "trainr: {max_epochs: 3}\ntrainer: {max_epochs: '${trainr.max_epochs}'}",  # used: no mistake
        "callbacks: {throughput: {anything: 1}}",  # known, not chosen
        "notes: {dates: [1]}\nname: mine",
    ],
)
def test_custom_keys_in_a_file(project, text):
    write(project, {"conf/recipe/good.yaml": f"# @package _global_\ndefaults: [line]\n{text}\n"})
    assert validate(read(["fit", "+recipe=good"])).command == "fit"


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.devices=auto", "trainer.limit_train_batches=3", "trainer.fast_dev_run=true", "optimizer.lr=1"],
        ["trainer.devices=[0,1]", "trainer.limit_train_batches=0.5", "trainer.fast_dev_run=3", "seed=null"],
        ["trainer.devices='0,1'", "trainer.deterministic=warn", "trainer.max_epochs=null", "ckpt_path=last"],
        [
            "trainer.devices=-1",
            "trainer.accelerator=auto",
            "precision.init_scale=1e3",
            "model.start=-1.5",
            "model.fail_at=3",
        ],
        ["callbacks.model_checkpoint=null", "optimizer={lr: 0.5}", "++anything.at.all=1", "+data.more={a: [1]}"],
        ["callbacks=none", "+optimizer.maximize=true", "~optimizer.nesterov", "model.start=${optimizer.lr}"],
        [
            "hydra.job.name=a",
            "hydra.verbose=[a,b]",
            "hydra.run.dir='my runs/${now:%Y}'",
            "precision._target_=line_fit.Mine",
        ],
        ["trainer.resume=null", "trainer.exact_resume=true"],
        ["trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy}"],
        ["trainer._target_=lightning.Trainer"],
    ],
)
def test_values_that_are_fine(project, settings):
    assert validate(read([*FIT, "precision=16", *settings])).command == "fit"


@pytest.mark.whole
def test_typo_help_and_recipes_import_neither_torch_nor_lightning(project):
    lines = [
        (["--help"], 0), (["fit", "--help"], 0), (["--version"], 0), (["recipes"], 0), ([], 0),
        (["fitt"], 2), ([*FIT, "trainer.max_epoch=1"], 2), ([*FIT, "precision=1"], 2),
        ([*FIT, "optimizer.lr=x"], 2), (["fit"], 2), ([*FIT, "--cfg", "job"], 0), ([*FIT, "-m", "precision=32,1"], 2),
        (["compare", "--help"], 0), (["compare"], 2), (["compare", "+recipe=line", "compare.mode=up"], 2),
    ]  # fmt: skip
    program = (
        "import sys\nfrom trainer.cli import main\n"
        f"for argv, status in {lines!r}:\n"
        "    assert main(argv) == status, argv\n"
        "    loaded = {'torch', 'lightning', 'numpy'}.intersection(sys.modules)\n"
        "    assert not loaded, (argv, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there are no such pipes")
def test_closed_pipe_of_a_help_is_not_an_error(project):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "trainer", "fit", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_exit_status_reaches_the_shell(project):
    done = subprocess.run([sys.executable, "-m", "trainer", "fitt"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"trainer: There is no command 'fitt'. Did you mean 'fit'? The commands are {', '.join(names())}.\n"
    )


REPLACED = {
    "conf/model/steep.yaml": "_target_: line_fit.Line\noptimizer: ${optimizer}\nnet: ???\n",
    "conf/model/any.yaml": "_target_: line_fit.Line\noptimizer: ${optimizer}\n",
    "conf/recipe/own.yaml": """
        # @package _global_
        defaults: [line]
        model: {start: 0.5, net: {_target_: torch.nn.Linear, in_features: 1}}
        optimizer: {momentum: 0.9, nesterov: true}
    """,
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["model=any"], "~model.start ~model.net"),
        (["model=steep"], "~model.start"),  # the recipe fills in net
        (["optimizer=adam"], "~optimizer.nesterov ~optimizer.momentum"),
        (["optimizer=adam", "optimizer.momentum=0.5"], "~optimizer.nesterov"),
        (["model=any", "model.start=1", "~model.net"], ""),  # given again
        (["model=line", "optimizer=sgd"], ""),  # those of the recipe
        (["trainer=default", "callbacks=default"], ""),
        (["scheduler=none"], ""),
    ],
)
def test_settings_of_a_replaced_option_are_named_with_their_removal(project, words, left):
    write(project, REPLACED)
    argv = ["fit", "+recipe=own", *words, "--cfg", "job"]
    if not left:
        validate(read(argv))
        return
    with pytest.raises(UsageError, match=r"replaces (model=line|optimizer=sgd), but the config keeps") as caught:
        validate(read(argv))
    removal = str(caught.value).partition("To remove them: ")[2].split()
    assert sorted(removal) == sorted(left.split())
    validate(read([*argv, *removal]))  # to the letter


def test_an_option_of_a_sweep_that_lacks_settings_of_the_recipe_is_refused(project):
    write(project, REPLACED)
    with pytest.raises(UsageError, match=r"~optimizer\.nesterov"):
        validate(read(["fit", "-m", "+recipe=own", "optimizer=sgd,adam"]))
