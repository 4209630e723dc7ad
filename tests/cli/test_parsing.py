import pytest

from trainer.cli.parsing import UsageError, canonical_precisions, read


def test_overrides_go_first_then_the_command_then_the_flags():
    arguments = read(["fit", "-m", "+recipe=a", "--config-dir", "here", "seed=1,2"])
    assert arguments.for_hydra() == ["+recipe=a", "seed=1,2", "command=fit", "--multirun", "--config-dir", "here"]


def test_rewritten_form_is_read_as_the_same_command_line():
    once = read(["validate", "--cfg", "job", "+recipe=a", "precision=16"])
    assert read(once.for_hydra()) == once
    assert once.for_hydra() == ["+recipe=a", "precision=16-mixed", "command=validate", "--cfg", "job"]


def test_arguments_appended_by_a_launcher_are_read():
    words = [*read(["fit", "+recipe=a"]).for_hydra(), 'hydra.run.dir="outputs/a b"', "hydra.output_subdir=null"]
    arguments = read(words)
    assert arguments.command == "fit"
    assert arguments.overrides == ["+recipe=a", 'hydra.run.dir="outputs/a b"', "hydra.output_subdir=null"]


def test_comparison_sweeps_over_all_precisions_by_default():
    default = "precision=32-true,16-mixed,bf16-mixed"
    assert read(["compare", "+recipe=a"]).for_hydra() == ["+recipe=a", default, "command=compare", "--multirun"]
    assert read(["compare", "precision=16,32"]).overrides == ["precision=16-mixed,32-true"]
    assert read(["compare", "sweep=lr"]).overrides == ["+sweep=lr"]
    assert read(["compare", "precision._target_=my.A,my.B"]).overrides == ["precision._target_=my.A,my.B"]
    assert read(["compare", "precision.init_scale=8"]).overrides == ["precision.init_scale=8", default]
    once = read(["compare", "+recipe=a", "seed=1"])
    assert read(once.for_hydra()) == once


@pytest.mark.parametrize(
    "argv",
    [
        ["fit", "seed=1", "--cfg", "job", "--resolve"],
        ["--cfg", "job", "fit", "seed=1", "--resolve"],
        ["-c", "job", "seed=1", "--resolve", "fit"],
    ],
)
def test_flags_may_be_anywhere(argv):
    arguments = read(argv)
    assert (arguments.command, arguments.overrides) == ("fit", ["seed=1"])
    assert arguments.flags == {"--cfg": "job", "--resolve": ""}


@pytest.mark.parametrize(
    ("argv", "value"), [(["--info"], "all"), (["--info", "fit"], "all"), (["-i", "plugins"], "plugins")]
)
def test_info_takes_only_values_of_hydra(argv, value):
    assert read(argv).flags == {"--info": value}


@pytest.mark.parametrize("group", ["recipe", "debug", "sweep"])
def test_plus_of_groups_outside_the_default_config_may_be_left_out(group):
    assert read([f"{group}=a", "fit"]).overrides == [f"+{group}=a"]
    assert read([f"+{group}=a", "fit"]).overrides == [f"+{group}=a"]
    assert read([f"++{group}=a", "fit"]).overrides == [f"+{group}=a"]


def test_home_directory_is_expanded_as_a_shell_would(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    given = ["data.root=~/a", "+data.roots=~/a,~/b", "ckpt=~/c d", "to=a~/b", "~data.root"]
    expected = ["data.root=/home/ann/a", "+data.roots=/home/ann/a,/home/ann/b", "ckpt='/home/ann/c d'"]
    assert read(given).overrides == [*expected, "to='a~/b'", "~data.root"]


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("16", "16-mixed"),
        ("fp32", "32-true"),
        ("32, bf16", "32-true, bf16-mixed"),
        ('"32","16"', "32-true,16-mixed"),
        ("choice(32,16)", "choice(32-true,16-mixed)"),
        ("mine16", "mine16"),
    ],
)
def test_precision_aliases(given, canonical):
    assert canonical_precisions(given) == canonical
    for key in ("precision", "+precision", "hydra.sweeper.params.precision"):
        assert read([f"{key}={given}"]).overrides == [f"{key}={canonical}"]


def test_other_settings_keep_their_numbers():
    assert read(["seed=32", "model.precision=16"]).overrides == ["seed=32", "model.precision=16"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fitt"], "There is no command 'fitt'. Did you mean 'fit'?"),
        (["fit", "test"], "Got two commands, 'fit' and 'test'"),
        (["fit", "+recipe", "resnet50"], "Got the word '+recipe', expected settings, key=value"),
        (["fit", "--lr", "1"], "There is no flag '--lr'. `python -m trainer fit --help` lists the flags."),
        (["fit", "--cfg"], "Got --cfg without a value"),
        (["fit", "--cfg", "jbo"], "Got --cfg jbo, expected one of job, hydra, all."),
        (["fit", "recipe", "=", "line"], "Got the word 'recipe', expected settings, key=value, without spaces"),
        (["fit", "-m", "--cfg", "job"], "Got --multirun and --cfg, which prints the config of a single run"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(UsageError) as caught:
        read(argv)
    assert message in str(caught.value)


def test_report_takes_folders_with_any_name():
    arguments = read(["report", "multirun/lr=0.1,precision=16", "out=1.html"])
    assert arguments.words == ["multirun/lr=0.1,precision=16", "out=1.html"]
    assert arguments.overrides == []
    assert read(["report", "a", "b", "c"]).words == ["a", "b", "c"]
    with pytest.raises(UsageError, match="expected settings"):
        read(["consolidate", "a", "b", "c"])
