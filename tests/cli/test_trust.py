"""Packages that the user's configs may name: trusted once, by the environment, or installed from a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main, trusted
from trainer.cli.arguments import UsageError
from trainer.cli.targets import Allowlist


@pytest.fixture(autouse=True)
def of_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's list, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv(trusted.VARIABLE, raising=False)
    return tmp_path / "settings/amp-trainer/trusted"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with one called ``nets``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "elsewhere/site-packages"
    write(folder, {"nets/__init__.py": "class Net:\n    pass\n\ndef load(file):\n    pass\n"})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return folder


def install(site: Path, noted: object, *, files: str = "nets/__init__.py,,\n") -> None:
    """Note down how the package was installed, as pip does."""
    info = {"METADATA": "Metadata-Version: 2.1\nName: my-nets\nVersion: 1.0\n", "RECORD": files}
    if noted is not None:
        info["direct_url.json"] = json.dumps(noted)
    for name, text in info.items():
        file = site / "my_nets-1.0.dist-info" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


NET = {"_target_": "nets.Net"}


def test_a_package_is_trusted_from_now_on(site: Path, of_user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"To trust it, from now on, in every config: python -m trainer trust nets$"):
        Allowlist().check(NET, "model")
    assert main(["trust", "nets"]) == 0
    assert "Trusted from now on: nets. Any config may name" in capsys.readouterr().out
    assert of_user.read_text() == "nets\n"
    Allowlist().check(NET, "model")
    assert Allowlist().locate("nets.Net").__name__ == "Net"
    assert main(["trust", "nets", "numpy"]) == 0
    assert of_user.read_text() == "nets\nnumpy\n"
    assert main(["trust"]) == 0
    assert capsys.readouterr().out.endswith("nets\nnumpy\n")


def test_what_unpickles_is_refused_of_a_trusted_package_too(site: Path) -> None:
    main(["trust", "nets"])
    for target in ("nets.load", "nets.Net.load_from_checkpoint", "nets.__loader__"):
        with pytest.raises(UsageError, match="runs or unpickles"):
            Allowlist().check({"_target_": target}, "model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pickle", "pickle runs, unpickles or writes what it is given"),
        ("torch.hub", "torch.hub runs, unpickles or writes"),
        ("torch", "Of torch a config may name what experiments are made of"),
        ("numpyy", "There is no package 'numpyy' installed. Did you mean 'numpy'? Install it first."),
        ("./nets", "trust got './nets', expected the name of a package as it is imported, such as timm."),
    ],
)
def test_what_cannot_be_trusted_is_refused(
    site: Path, of_user: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    install(site, None)
    assert main(["trust", name]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not of_user.exists()


def test_the_environment_stands_in_the_place_of_the_file(
    site: Path, of_user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["trust", "numpy"])
    monkeypatch.setenv(trusted.VARIABLE, "nets, yaml")
    assert trusted.packages() == ("nets", "yaml")
    Allowlist().check(NET, "model")
    assert main(["trust", "scipy"]) == 2
    assert "TRAINER_TRUST is set in the environment" in capsys.readouterr().err
    assert of_user.read_text() == "numpy\n"


def test_other_processes_of_a_command_trust_what_the_first_one_does(
    site: Path, of_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["trust", "nets"])
    seen = []
    monkeypatch.setattr("trainer.cli._dispatch", lambda arguments: seen.append(os.environ[trusted.VARIABLE]) or 0)
    assert main(["fit", "+recipe=line"]) == 0
    assert seen == ["nets"]
    assert trusted.VARIABLE not in os.environ


def test_a_list_that_cannot_be_read_is_named(of_user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_user.mkdir(parents=True)
    assert main(["fit", "+recipe=line"]) == 2
    assert f"{of_user} cannot be read" in "".join(capsys.readouterr().err.split("\n")).replace("  ", " ")


@pytest.mark.parametrize(
    ("noted", "allowed"),
    [
        ({"url": "file:///home/me/nets", "dir_info": {}}, True),
        ({"url": "file:///home/me/nets", "dir_info": {"editable": False}}, True),
        ({"url": "https://example.org/nets.git", "vcs_info": {"vcs": "git"}}, False),
        ({"url": "file:///home/me/nets.whl", "archive_info": {}}, False),
        ({"dir_info": {}}, False),
        ("file:///home/me/nets", False),
        (None, False),
    ],
)
def test_a_package_that_was_installed_from_a_folder_is_the_users(site: Path, noted: object, allowed: bool) -> None:
    install(site, noted)
    assert trusted.is_installed_from_folder("nets") is allowed
    if allowed:
        Allowlist().check(NET, "model")
        with pytest.raises(UsageError, match="runs or unpickles"):
            Allowlist().check({"_target_": "nets.load"}, "model")


def test_a_package_of_another_distribution_is_not(site: Path) -> None:
    install(site, {"url": "file:///home/me/others", "dir_info": {}}, files="others/__init__.py,,\nnets/more.py,,\n")
    assert not trusted.is_installed_from_folder("nets")


def test_an_editable_package_is_found_where_it_lies(site: Path, tmp_path: Path) -> None:
    source = (tmp_path / "elsewhere").as_uri()
    install(site, {"url": source, "dir_info": {"editable": True}}, files="__editable__.my_nets.pth,,\n")
    assert trusted.is_installed_from_folder("nets")
    install(site, {"url": source + "/other", "dir_info": {"editable": True}}, files="__editable__.my_nets.pth,,\n")
    assert not trusted.is_installed_from_folder("nets")


def test_our_own_package_is_no_package_of_the_users() -> None:
    assert not trusted.is_installed_from_folder("trainer")
    assert not trusted.is_installed_from_folder("tests")


def test_each_name_is_judged_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    refusal = Allowlist._refusal
    monkeypatch.setattr(Allowlist, "_refusal", lambda self, *names: judged.append(names) or refusal(self, *names))
    allowlist = Allowlist(["nets"])
    for _ in range(3):
        allowlist.check({"a": NET, "b": [NET, NET]})
        assert allowlist.locate("nets.Net") is allowlist.locate("nets.Net")
    assert judged == [("nets.Net", "nets.Net")]
