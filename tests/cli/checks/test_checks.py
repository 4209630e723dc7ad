"""``checks``: its report on this machine and on simulated ones, and on broken ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import on_machine
from trainer.cli import checks, main
from trainer.cli.checks import precisions
from trainer.common import machine
from trainer.precision import devices


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    """Replace the measured speeds."""
    on_machine(monkeypatch, {"convolution backward": 31.52, "recurrent": float("inf")}, other=0.8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1), raising=False)
    rates = {
        "float32": {"matrix products": 1e11, "convolutions": 8e10},
        "float16": {"matrix products": 9e10},
        "bfloat16": {"matrix products": 4.1e12, "convolutions": 1.6e11},
    }
    monkeypatch.setattr(precisions, "measure", lambda device: rates)
    return rates


def facts(capsys):
    main(["checks", "json"])
    return json.loads(capsys.readouterr().out)


def test_printed_report(capsys, monkeypatch):
    monkeypatch.setattr(devices, "_cpu_has_bfloat16", lambda: True)
    assert main(["checks"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__} (" in " ".join(out.split())
    assert "precisions on" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "bf16-mixed native: instructions or units that torch uses" in lines
    assert "float32 100.0 GFLOP/s in matrix products, 80.0 GFLOP/s in convolutions" in lines
    assert "float16 90.0 GFLOP/s in matrix products" in lines
    assert "convolution backward fast: torch's take 31.5x the time" in lines
    assert "matrix product native: torch's take 0.8x the time" in lines
    assert "recurrent fast: no kernel of torch's" in lines
    assert "bfloat16 4,100.0 GFLOP/s in matrix products, 160.0 GFLOP/s in convolutions" in lines
    assert "measured 41.0x in matrix products and 2.0x in convolutions against float32." in lines[-1]
    assert list(Path().iterdir()) == []


def test_measurement_slower_than_the_hardware_suggests(measured, monkeypatch):
    monkeypatch.setattr(devices, "_cpu_has_bfloat16", lambda: True)
    reference = {"matrix products": 1.0, "convolutions": 1.0}
    slower = {"float32": reference, "bfloat16": {"matrix products": 0.4, "convolutions": 1.2}}
    verdict = precisions.verdict(torch.device("cpu"), slower)
    assert verdict.startswith("Use precision=32 here: precision=auto takes bf16-mixed, because this CPU computes in")
    assert "slower than float32 on average: 0.4x in matrix products and 1.2x in convolutions." in verdict
    mixed = {"float32": reference, "bfloat16": {"matrix products": 0.9, "convolutions": 1.8}}
    assert precisions.verdict(torch.device("cpu"), mixed).startswith("Use precision=bf16-mixed here")


def test_gpu(capsys, monkeypatch, measured):
    measured["float16"] = {"matrix products": 3.9e11, "convolutions": 2.48e11}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**34))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "cores", lambda: machine.Cores(16, 16, None))
    found = facts(capsys)
    about = found["machine"]
    assert list(about["devices"]) == ["cuda:0", "cuda:1", "cpu"]
    assert about["devices"]["cuda:0"] == "Tesla T4, 16.0 GiB, compute capability 7.5"
    assert {"precisions on Tesla T4", f"precisions on {machine.cpu_name()}", "speed of Tesla T4"} < about.keys()
    assert about["host"]["dataloaders"].startswith("num_workers=7 ")
    assert found["verdict"].startswith("Use precision=16-mixed here: Tesla T4 has Tensor Cores, but no bfloat16 units")


def test_driver_that_torch_cannot_use(capsys, monkeypatch):
    monkeypatch.setattr(checks, "nvidia_driver", lambda: "570.86.15")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = facts(capsys)
    assert found["machine"]["versions"]["NVIDIA driver"] == "570.86.15"
    assert "There is an NVIDIA driver, but torch was built without CUDA." in found["remarks"]


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_version_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.nvidia_driver() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    assert checks.nvidia_driver() == "570.86.15"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert checks.nvidia_driver() is None


def test_full_disk_is_a_problem(capsys, monkeypatch):
    disk = machine.Disk(machine.disk(Path.cwd()).folder, 0, 2**30, "No space left on device")
    monkeypatch.setattr(machine, "disk", lambda folder: disk)
    assert main(["checks"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"Broken: {Path.cwd()} cannot be written: No space left on device (0 bytes of 1.0 GiB free)." in out
    assert out.count("Broken:") == 1


def test_little_space_and_little_shared_memory_are_remarks(capsys, monkeypatch):
    monkeypatch.setattr(machine, "disk", lambda folder: machine.Disk(Path("/"), 2**20, 2**30, None, "nfs4"))
    monkeypatch.setattr(machine, "shared_memory", lambda: (2**20, 64 * 2**20))
    assert main(["checks"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Note: / has 1 MiB left" in out
    assert "/dev/shm has 64 MiB" in out
    assert "on a network (nfs4)" in out


def test_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}
    command = [sys.executable, "-m", "trainer", "checks"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 1
    assert "Broken: torch cannot be imported: OSError: libcudart.so.13" in ended.stdout
    assert "No training is possible before `pip install --force-reinstall torch`." in ended.stdout
    assert "Traceback" not in ended.stderr


def test_quiet_prints_the_verdict_and_problems(capsys, monkeypatch):
    found = checks.Findings()
    found.about("versions", {"torch": "2"})
    found.remark("Busy.")
    found.problem("Disk.")
    found.facts["verdict"] = "Use precision=32-true here."
    monkeypatch.setenv("TRAINER_QUIET", "1")
    checks.show(found)
    assert capsys.readouterr().out == "Note: Busy.\nBroken: Disk.\nUse precision=32-true here.\n"
    monkeypatch.delenv("TRAINER_QUIET")
    checks.show(found)
    assert "versions" in capsys.readouterr().out
