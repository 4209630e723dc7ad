"""Values that a config takes from the environment are not written."""

import logging

import pytest
from omegaconf import OmegaConf

from trainer.common import redaction


def test_texts():
    redaction.remember("TOKEN", "hunter2")
    redaction.remember("LONGER", "hunter2000")
    redaction.remember("SHORT", "cpu")
    redaction.remember("EMPTY", "")
    assert redaction.text("hunter2") == "${oc.env:TOKEN}"
    assert redaction.text("a hunter2000, a hunter2") == "a ${oc.env:LONGER}, a ${oc.env:TOKEN}"
    assert redaction.text("cpu") == "${oc.env:SHORT}"
    assert redaction.text("a cpu") == "a cpu"
    assert redaction.text("") == ""


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://me:pass@host/x", "s3://me:***@host/x"),
        ("at https://:pass@host:80/x and http://a:b@c", "at https://:***@host:80/x and http://a:***@c"),
        ("https://host:80/x@y", "https://host:80/x@y"),
        ("me:pass@host", "me:pass@host"),
    ],
)
def test_passwords_in_addresses(address, shown):
    assert redaction.text(address) == shown


def test_containers_are_copied_if_they_change():
    redaction.remember("TOKEN", "hunter2")
    same = [1, {"a": "b"}]
    given = {"x": same, "hunter2": ("hunter2", None)}
    assert redaction.containers(given) == {"x": same, "${oc.env:TOKEN}": ("${oc.env:TOKEN}", None)}
    assert redaction.containers(given)["x"] is same
    assert redaction.containers(same) is same
    assert given["hunter2"] == ("hunter2", None)


def test_values_read_by_a_config_are_stored(monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    redaction.register()
    config = OmegaConf.create(
        {"a": "x-${oc.env:TOKEN}", "b": "${oc.env:NOT_THERE,default}", "c": "${oc.env:NOPE,null}"}
    )
    assert redaction.text("hunter2") == "hunter2"
    assert OmegaConf.to_container(config, resolve=True) == {"a": "x-hunter2", "b": "default", "c": None}
    assert redaction.text("hunter2 default") == "${oc.env:TOKEN} default"


def test_log_records():
    redaction.remember("TOKEN", "hunter2")
    try:
        raise ValueError("no hunter2")
    except ValueError:
        import sys

        record = logging.LogRecord("n", logging.INFO, "", 0, "it is %s", ("hunter2",), sys.exc_info())
    assert redaction.Filter().filter(record)
    message = logging.Formatter("%(message)s").format(record)
    assert message.startswith("it is ${oc.env:TOKEN}\nTraceback")
    assert message.endswith("ValueError: no ${oc.env:TOKEN}")
    record = logging.LogRecord("n", logging.INFO, "", 0, "it is %s", ("fine",), None)
    redaction.Filter().filter(record)
    assert record.args == ("fine",)
