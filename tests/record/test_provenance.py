"""The environment of a run: recorded and redacted values."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from trainer.common import machine, redaction
from trainer.record import provenance as module
from trainer.record.provenance import environment


def test_recorded_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_SETTING", "mine")
    found = environment()
    assert abs(found["started"] - time.time()) < 60
    expected = {
        "pid": os.getpid(), "command": sys.orig_argv, "directory": str(tmp_path), "git": None,
        "cores": machine.cores().usable, "memory": machine.memory().most,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["versions"]["torch"].startswith("2.")
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "mine" not in json.dumps(found)


def test_environment_contains_no_secrets(monkeypatch):
    redaction.remember("TOKEN", "hunter2hunter2")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "key=hunter2hunter2", "s3://me:pass@host/x"])
    assert environment()["command"] == ["python", "train.py", "key=${oc.env:TOKEN}", "s3://me:***@host/x"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    git("init", "-b", "trunk")
    assert environment()["git"] is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    (tmp_path / "unknown").write_text("1")
    expected = {"commit": git("rev-parse", "HEAD").strip(), "branch": "trunk", "modified": False}
    assert environment()["git"] == expected
    (tmp_path / "a").write_text("2")
    assert environment()["git"] == expected | {"modified": True}
    monkeypatch.setattr(module, "_GIT_TIMEOUT", 0.0)  # a disk that answers too late
    assert environment()["git"] is None
    monkeypatch.setattr(module, "_GIT_TIMEOUT", 5.0)
    monkeypatch.setenv("PATH", "")  # without git
    assert environment()["git"] is None
