"""A config takes a secret from the environment: no file and no output of the run contains it."""

import sys

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.common import redaction

SECRET = "hunter2-is-the-password"

MODULE = """
import logging

import line_fit


class Logs(line_fit.Line):
    def __init__(self, optimizer, token, url, nested=None, fail=False, start=None, fail_at=None):
        super().__init__(optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        assert token == "hunter2-is-the-password", token
        assert url == "https://me:hunter2-is-the-password@localhost/x"
        self.fail = fail

    def on_train_start(self):
        logging.getLogger("theirs").warning("connecting to %s", self.hparams.url)
        try:
            raise OSError(f"no {self.hparams.token}")
        except OSError:
            logging.getLogger("theirs").exception("failed")
        if self.fail:
            raise RuntimeError(f"cannot log in with {self.hparams.token}")


class Points(line_fit.Points):
    def __init__(self, secret, batch_size=None):
        super().__init__()
        self.save_hyperparameters()
"""

RECIPE = """
    # @package _global_
    defaults: [line, override /logger: default]
    model:
      _target_: secretive.Logs
      token: ${oc.env:A_TOKEN}
      url: https://me:${model.token}@localhost/x
      nested: {list: ["${model.token}", 1], other: [a]}
      fail: false
      start: null
      fail_at: null
    data:
      _target_: secretive.Points
      secret: ${model.token}
      batch_size: null
"""


@pytest.fixture(autouse=True)
def secretive(project, monkeypatch):
    write(project, {"secretive.py": MODULE, "conf/recipe/secret.yaml": RECIPE})
    monkeypatch.delitem(sys.modules, "secretive", raising=False)
    monkeypatch.setenv("A_TOKEN", SECRET)
    redaction.forget()
    yield
    redaction.forget()


@pytest.mark.parametrize("fail", ["false", "true"])
@pytest.mark.filterwarnings("ignore:Attribute")
def test_no_file_contains_the_secret(project, capfd, fail):
    status = main(["fit", "+recipe=secret", f"model.fail={fail}", "hydra.run.dir=run"])
    out, err = capfd.readouterr()
    assert status == (fail == "true"), err
    assert SECRET not in out + err
    assert "${oc.env:A_TOKEN}" in err  # the log in the terminal
    files = [file for file in (project / "run").rglob("*") if file.is_file()]
    assert [str(file) for file in files if SECRET.encode() in file.read_bytes()] == []
    hparams = (project / "run/csv/hparams.yaml").read_text()
    assert "token: ${oc.env:A_TOKEN}" in hparams
    assert "url: https://me:***@localhost/x" in hparams
    names = {file.name for file in files}
    assert {"config.yaml", "overrides.yaml", "run.json", "fit.log", "hparams.yaml"} <= names
    assert ("last.ckpt" in names) == (fail == "false")
    assert "connecting to https://me:***@localhost/x" in (project / "run/fit.log").read_text()


def test_error_messages_do_not_contain_the_secret(project, capsys):
    assert main(["fit", "+recipe=line", "trainer.strategy=${oc.env:A_TOKEN}"]) == 2
    err = capsys.readouterr().err
    assert SECRET not in err
    assert "trainer.strategy is ${oc.env:A_TOKEN}" in err


def test_no_file_contains_a_password_of_an_address(project, capsys):
    address = "s3x://me:hunter3@localhost/${oc.env:A_TOKEN}.ckpt"
    assert main(["fit", "+recipe=line", f"ckpt_path='{address}'", "hydra.run.dir=run"]) == 1
    out, err = capsys.readouterr()
    assert "s3x://me:***@localhost/${oc.env:A_TOKEN}.ckpt" in err
    files = [file.read_bytes() for file in (project / "run").rglob("*") if file.is_file()]
    assert not any(
        secret in text for text in [*files, (out + err).encode()] for secret in (b"hunter3", SECRET.encode())
    )
