"""Text in a config or a run's folder cannot send control sequences to the terminal."""

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.failure import printable

EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b31m\r"


def test_printable():
    assert printable(f"a {EVIL}\x1b[1mb\x1b[0m\tc\nd é") == ("a \\x1b]52;c;cHduZWQ=\\x07\\x1b[2J\\x9b31m\\rb\tc\nd é")


@pytest.mark.parametrize("text", ["trainer: {strategy: EVIL}", "hydra: {job: {name: EVIL}}"])
def test_control_characters_of_a_config_are_escaped(project, capsys, text):
    text = text.replace("EVIL", '"\\e]52;c;cHduZWQ=\\a\\e[2J"')
    write(project, {"conf/recipe/evil.yaml": f"# @package _global_\ndefaults: [line]\n{text}\n"})
    assert main(["fit", "+recipe=evil"]) == 2
    err = capsys.readouterr().err
    assert "\\x1b]52;c;cHduZWQ=\\x07\\x1b[2J" in err
    assert "\x1b]" not in err


def test_control_characters_of_a_recipes_comment_are_escaped(project, capsys):
    write(project, {"conf/recipe/evil.yaml": f"# @package _global_\n# See {EVIL}\ndefaults: [line]\n"})
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "See \\x1b]52;c;cHduZWQ=\\x07" in out
    assert "\x1b]" not in out
