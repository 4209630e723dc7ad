"""The page of one run, in any state of the run and of its files."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.report.conftest import CURVES, ENVIRONMENT, ROWS, facts, report
from trainer.cli.report.page import note_of
from trainer.common import redaction
from trainer.record.charts import sections_of
from trainer.record.run_record import load_run

NO_FILES = dict.fromkeys((".hydra/config.yaml", ".hydra/overrides.yaml", "csv/metrics.csv", "fit.log"))


def test_page_has_everything_and_uses_no_network(make_run, capsys):
    folder = make_run()
    page = report(folder, "pages/mine.html")
    assert capsys.readouterr().out == f"The report is {Path('pages/mine.html')}\n"
    assert not (folder / "report.html").exists()
    for expected in (
        "digits Completed", "Precision 16-mixed", "Devices 1 x CPU", "Seed 42", "Best val_acc 0.75 at step 4",
        "val_loss 1.5 last", "Optimizer steps 4 2 of 2 epochs", "Skipped steps 1 25.0% of all", "Loss scale 32,768",
        "Time 0:01:02", "Throughput 123.4 samples per second", "Peak memory 3.0 GiB of the process",
    ):  # fmt: skip
        assert expected in page.text
    diagnosis = page.sections["diagnosis"]
    assert diagnosis.startswith("Diagnosis Verdict: backward pass overflows in 16 bits (step 2)")
    for expected in (
        "No loss scale fits: the gradients of net.fc.weight overflow in 'net.fc'",
        "Remedy: precision.fp32_modules=[net.fc]", "If that does not help: precision=bf16-mixed",
        "loss scale | 4.1943e+06",
    ):  # fmt: skip
        assert expected in diagnosis
    assert "python -m trainer fit +recipe=digits precision=16-mixed" in page.sections["settings"]
    assert "optimizer.lr 0.1" in page.sections["settings"]
    for expected in ("Zuse Z4", "torch 2.15.0", "0123456789ab with changes", "16.0 GiB", "OMP_NUM_THREADS 1"):
        assert expected in page.sections["environment"]
    assert page.sections["warnings"] == "Warnings take care"
    assert "[INFO] - hello" in page.sections["log"]

    assert page.having("script", "src") == page.having("link", "href") == page.having("img", "src") == []
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-")
    assert f"'sha256-{digest}'" in policy


def test_contents_of_the_charts_of_a_running_fit(make_run):
    """Rows are written earlier than the points in ``run.json``."""
    rows = ROWS + ",,,2,,,4,9.0,,\n16384.0,0.25,2.0,2,2.5,,5,0.75,,\n8192.0,0.25,3.0,2,2.5,,7,0.5,,\n"
    page = report(make_run(record=facts(status="running", steps=None, epochs=1), files={"csv/metrics.csv": rows}))
    assert "digits Running" in page.text
    assert "The run is in progress: step 8, written" in page.text
    assert "Optimizer steps 8 1 of 2 epochs" in page.text
    assert page.titles == [
        "Loss", "val_acc", "Learning rate", "Loss scale", "Skipped steps", "Skip rate", "Gradient norm", "Throughput",
        "Memory",
    ]  # fmt: skip
    loss = page.lines("Loss")
    assert (loss["train"]["x"], loss["train"]["y"]) == ([1, 2, 3, 4, 5, 7], [4.0, 3.0, 2.0, 1.0, 0.75, 0.5])
    assert (loss["val_loss"]["x"], loss["val_loss"]["y"]) == ([1, 3], [2.5, 1.5])
    assert page.lines("Learning rate")["SGD"]["y"] == [0.1, 0.05]
    assert page.lines("Loss scale")["scale"] == {
        "name": "scale", "color": 0, "x": [1, 3, 4, 5, 7], "y": [65536.0, 32768.0, 32768.0, 16384.0, 8192.0],
        "steps": True,
    }  # fmt: skip
    assert page.lines("Gradient norm")["step"]["y"] == [9.5, 7.5, 3.5, 2.5, 2.5]
    assert page.lines("Throughput")["rate"]["y"] == [8.0, 8.0, 4.0]  # 8 samples a step; 1, 1 and 2 seconds
    assert page.lines("Memory")["memory"]["y"] == [1.0, 2.0]
    assert "skipped step" in page.sections["curves"]


@pytest.mark.skipif(sys.platform == "win32", reason="the process cannot be found")
def test_run_without_a_final_status(make_run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    for where, status, note in (
        ({"pid": process.pid}, "killed", "exited without writing a status: it was killed, or the machine failed. Last"),
        ({"host": "elsewhere"}, "unfinished", "no final status, and its process is on another machine. Last: step 4"),
    ):
        run = load_run(make_run(record=facts(status="running", steps=None, environment=ENVIRONMENT | where)))
        assert run.status == status
        assert note in note_of(run)


@pytest.mark.parametrize(
    ("record", "rows", "config", "overrides"),
    [
        ('{"status": "comp', ROWS[:-2], "seed: 42\ntrainer: {max_ep", "- +recipe=digits\n- ["),  # half written
        ({"status": 3, "metrics": [], "seconds": None, "peak_memory": None, "objective": 7}, "a,b\n1,2\n", "- a\n", ""),
        ({"curves": {"losses": 3, "metrics": [], "seconds": {"steps": None}, "scales": None}}, "", "3", "3"),
    ],
)
def test_files_with_other_contents_are_accepted(make_run, record, rows, config, overrides):
    files = {"run.json": record, "csv/metrics.csv": rows, ".hydra/config.yaml": config}
    files |= {".hydra/overrides.yaml": overrides, "fit.log": "[2026", "csv/diagnosis_step_9.md": ""}
    page = report(make_run(files=files | {"csv/diagnosis_step_2.md": "# Verd"}))
    assert ("val_acc" in page.titles) is ("val_acc" in rows)
    assert page.sections["diagnosis"] == "Diagnosis Verd"


def test_fit_in_a_script(make_run):
    """A fit of a Trainer without the command line: no configs, all files in the logger's folder."""
    record = {"status": "failed", "error": "NonFiniteError: loss nan.\nTry: another way.", "metrics": {"a": 1}}
    page = report(make_run("lightning_logs/version_0", record=record, files=NO_FILES | {"metrics.csv": ROWS}))
    assert "version_0 Failed" in page.text
    assert "Why it failed NonFiniteError: loss nan. Try: another way." in page.text
    assert "val_acc" in page.titles
    assert "There is no run.json" in page.sections["environment"]
    assert "There is no .hydra/config.yaml" in page.sections["settings"]


def test_run_without_a_logger_and_without_a_scale_monitor(make_run):
    page = report(make_run(files={"csv/metrics.csv": None}))
    assert page.titles == ["Loss", "Loss scale", "Skipped steps", "Throughput", "Memory"]
    assert (
        "There is no metrics.csv with the logged values. logger=csv and the default logger write it"
        in page.sections["curves"]
    )
    record = facts(curves={}, skipped_steps=0, scale=None)
    page = report(make_run("outputs/b/1", record=record, files={"csv/metrics.csv": "step,val_acc\n1,0.5\n"}))
    assert "Loss scale and gradients were not logged. ScaleMonitor, in" in page.sections["curves"]


def test_speed_is_averaged_over_a_tenth_of_a_second(make_run):
    quick = CURVES | {"seconds": {"steps": [1, 2, 3, 4], "values": [1.0, 1.01, 1.02, 1.05]}}
    once = quick | {"memory": {"steps": [1], "values": [2**20]}}
    for curves, expected in ((quick, ["Memory"]), (once, [])):
        sections = {part.title: part for part in sections_of(load_run(make_run(record=facts(curves=curves))))}
        charts = sections["Speed and memory"].charts if expected else []
        assert [chart.title for chart in charts] == expected
        assert ("Speed and memory" in sections) is bool(expected)


def test_axes_of_powers_and_values_that_are_not_finite(make_run):
    values = [1.0, float("nan"), 1e-5, float("inf"), 1e-7]
    curves = CURVES | {"losses": {"steps": [1, 2, 3, 4, 5], "values": values}}
    page = report(make_run(record=facts(curves=curves), files={"csv/metrics.csv": "step,val_acc\n1,nan\n3,inf\n"}))
    assert "10^{-6}" in page.html
    assert "2^{16}" in page.html
    assert "2 values are not finite, the first at step 2 (red marks)" in page.sections["curves"]
    assert "NaN" not in json.dumps(page.data)
    chart = page.html[page.html.index("<h4>val_acc") :]
    assert "not finite, the first at step 1" in chart
    assert 'id="ytick' not in chart[: chart.index("</svg>")]


def test_other_values_that_were_logged(make_run):
    rows = "epoch,reward,step,train_f1_epoch,train_f1_step,val_f1\n0,5.0,1,,0.1,\n0,,1,0.2,,0.3\n0,6.0,2,,0.4,\n"
    page = report(make_run(record=facts(curves={}, skipped_steps=0, scale=None), files={"csv/metrics.csv": rows}))
    assert page.titles == ["f1", "reward"]
    assert set(page.lines("f1")) == {"train_f1_epoch", "val_f1"}  # values per step have no entry in the legend


def test_secrets_are_not_in_the_page(make_run):
    redaction.remember("TOKEN", "hunter2hunter2")
    config = "logger: {wandb: {api_key: 0123abcd, token: '${oc.env:T}', tokens: 512, url: 'https://me:pw9@host/x'}}\n"
    record = facts(
        overrides=["+logger.wandb.api_key=0123abcd", "a=hunter2hunter2"],
        environment=ENVIRONMENT | {"command": ["x", "logger.wandb.api_key=0123abcd"]},
    )
    log = "[now][a][WARNING] - got hunter2hunter2 from https://me:pw9@host/x\n"
    page = report(make_run(record=record, files={".hydra/config.yaml": config, "fit.log": log}))
    for secret in ("hunter2hunter2", "0123abcd", "pw9"):
        assert secret not in page.html
    assert "logger.wandb.api_key=***" in page.text
    for expected in ("wandb.api_key ***", "wandb.token ${oc.env:T}", "wandb.tokens 512", "https://me:***@host/x"):
        assert expected in page.sections["settings"]


@pytest.mark.whole
def test_long_run_makes_a_page_of_moderate_size_without_torch(make_run):
    names = [f"val_{index}" for index in range(8)]
    rows = [f"{step % 7},{step}," + ",".join([f"{(step * 37 % 101) / 101:.6f}"] * 8) for step in range(3_000)]
    rows[2_000] = rows[2_000].rpartition(",")[0] + ",9.5"
    folder = make_run(files={"csv/metrics.csv": "\n".join([f"epoch,step,{','.join(names)}", *rows, ""])})
    code = (
        "import sys\nfrom tests.cli.report.conftest import report\n"
        f"page = report({str(folder)!r})\n"
        "assert len(page.html) < 600_000\n"
        "line = page.lines('val_7')['val_7']\n"
        "assert len(line['x']) <= 400\n"
        "assert (line['x'][0], line['x'][-1], line['x'][line['y'].index(9.5)]) == (0, 2_999, 2_000)\n"
        "assert not {'torch', 'lightning', 'pandas', 'hydra'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_norms_of_layers_are_a_heat_map(make_run):
    rows = "grad_norm/net.0,grad_norm/net.2,grad_norm_step,step\n0.5,inf,,1\n,,3.0,2\n0.25,1e-9,,3\n0.125,nan,,5\n"
    page = report(make_run(files={"csv/metrics.csv": rows}))
    shown = page.data[page.titles.index("Gradient norm by layer")]["map"]
    assert shown["names"] == ["net.0", "net.2"]
    assert shown["steps"] == [1, 3, 5]
    assert shown["values"] == [[0.5, 0.25, 0.125], ["not finite", 1e-9, "not finite"]]
    assert "5.00e-07 0.5" in page.text.replace("5e-07", "5.00e-07")  # the colors end at a millionth of the largest
    assert "Largest at the end: net.0 0.125, net.2 nan" in page.text
    assert "2 values are not finite, the first at step 1 (red)." in page.text
    assert page.titles.count("Gradient norm") == 1  # is another chart
    image = page.html.partition("Gradient norm by layer</h4>")[2].partition("</svg>")[0]
    assert image.count("<image ") == image.count("data:image/png;base64,") == 1


def test_heat_map_of_many_layers_has_a_limited_size(make_run):
    names = [f"grad_norm/net.{index}" for index in range(300)]
    rows = [
        ",".join([*(f"{(step * 37 + i) % 101 / 101:.6f}" for i in range(300)), str(step)])
        for step in range(0, 4000, 10)
    ]
    rows[201] = ",".join(["0.5", "99.0", *["0.5"] * 298, "2010"])
    page = report(make_run(files={"csv/metrics.csv": "\n".join([",".join([*names, "step"]), *rows, ""])}))
    shown = page.data[page.titles.index("Gradient norm by layer")]["map"]
    assert (len(shown["names"]), len(shown["steps"])) == (100, 80)
    peak = shown["values"][shown["names"].index("net.1")]
    assert [value for value in peak if value > 1] == [99.0]
    assert abs(shown["steps"][peak.index(99.0)] - 2010) < 30
    assert "Shows the 100 of 300 layers with the largest values." in page.text
    assert len(page.html) < 400_000
