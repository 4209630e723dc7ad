"""The page of one run, in any state of the run and of its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.report.conftest import CURVES, ENVIRONMENT, ROWS, Page, facts, report
from trainer import redaction
from trainer.cli import main


def test_everything_is_on_the_page(make_run):
    page = report(make_run())
    for expected in (
        "digits Completed", "Precision 16-mixed", "Devices 1 x CPU", "Seed 42", "Best val_acc 0.75 at step 3",
        "val_loss 1.5 last", "Optimizer steps 4 2 of 2 epochs", "Skipped steps 1 25.0% of all", "Loss scale 32,768",
        "Time 1 min 02 s", "Throughput 123.4 samples per second", "Peak memory 3.0 GiB of the process",
    ):  # fmt: skip
        assert expected in page.text
    assert page.titles == [
        "Loss", "val_acc", "Learning rate", "Loss scale", "Skipped steps", "Skip rate", "Gradient norm", "Throughput",
        "Memory",
    ]  # fmt: skip
    assert "python -m trainer fit +recipe=digits precision=16-mixed" in page.sections["settings"]
    assert "optimizer lr 0.1" in page.sections["settings"]
    for expected in ("Zuse Z4", "torch 2.15.0", "0123456789ab with changes", "16.0 GiB", "OMP_NUM_THREADS 1"):
        assert expected in page.sections["environment"]
    assert page.sections["warnings"] == "Warnings take care"
    assert "csv/metrics.csv" in page.sections["files"]
    assert "[INFO] - hello" in page.sections["files"]


def test_contents_of_the_charts(make_run):
    page = report(make_run())
    loss = page.lines("Loss")
    assert loss["train"]["y"] == [4.0, 3.0, 2.0, 1.0]
    assert (loss["val_loss"]["x"], loss["val_loss"]["y"]) == ([1, 3], [2.5, 1.5])
    assert page.lines("Learning rate")["SGD"]["y"] == [0.1, 0.05]
    assert page.lines("Loss scale")["scale"] == {
        "name": "scale", "color": 0, "x": [1, 3, 4], "y": [65536.0, 32768.0, 32768.0], "steps": True,
    }  # fmt: skip
    assert page.lines("Gradient norm")["step"]["y"] == [9.5, 7.5, 3.5]
    assert page.lines("Throughput")["rate"]["y"] == [8.0, 8.0, 4.0]  # 8 samples a step; 1, 1 and 2 seconds
    assert page.lines("Memory")["memory"]["y"] == [1.0, 2.0]
    assert "skipped step" in page.sections["curves"]


def test_a_diagnosis(make_run):
    text = report(make_run()).sections["diagnosis"]
    assert text.startswith("Diagnosis Verdict: backward pass overflows in 16 bits (step 2)")
    assert "No loss scale fits: gradients overflow in 'net.fc'" in text
    assert "Remedy: precision.fp32_modules=[net.fc]" in text
    assert "If that does not help: precision=bf16-mixed" in text
    assert "loss scale 4.1943e+06" in text


def test_half_of_a_diagnosis(make_run):
    page = report(make_run(files={"csv/diagnosis_step_2.md": "# Verd", "csv/diagnosis_step_9.md": ""}))
    assert page.sections["diagnosis"] == "Diagnosis Verd"


def test_run_that_failed(make_run):
    record = facts(status="failed", error="NonFiniteError: loss nan.\nTry: another way.")
    page = report(make_run(record=record))
    assert "digits Failed" in page.text
    assert "Why it failed NonFiniteError: loss nan. Try: another way." in page.text


def test_interrupted_run(make_run):
    assert "digits Interrupted" in report(make_run(record=facts(status="interrupted"))).text


def running(pid: int, **more: object) -> dict:
    return facts(status="running", steps=None, environment=ENVIRONMENT | {"pid": pid}, **more)


def test_running_run(make_run):
    page = report(make_run(record=running(os.getpid(), epochs=1)))
    assert "digits Running" in page.text
    assert "The run is in progress: step 4, written" in page.text
    assert "Optimizer steps 4 1 of 2 epochs" in page.text
    assert page.titles[:3] == ["Loss", "val_acc", "Learning rate"]


def test_rows_that_are_newer_than_the_points(make_run):
    rows = ROWS + "16384.0,0.25,2.0,2,2.5,,5,0.75,,\n8192.0,0.25,3.0,2,2.5,,7,0.5,,\n"
    page = report(make_run(record=running(os.getpid()), files={"csv/metrics.csv": rows}))
    scale, loss = page.lines("Loss scale")["scale"], page.lines("Loss")["train"]
    assert (scale["x"], scale["y"]) == ([1, 3, 4, 5, 7], [65536.0, 32768.0, 32768.0, 16384.0, 8192.0])
    assert (loss["x"], loss["y"]) == ([1, 2, 3, 4, 5, 7], [4.0, 3.0, 2.0, 1.0, 0.75, 0.5])


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be asked for")
def test_run_with_a_lost_process(make_run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    page = report(make_run(record=running(process.pid)))
    assert "digits Killed" in page.text
    assert "Last: step 4" in page.text


def test_run_on_another_machine(make_run):
    elsewhere = facts(status="running", environment=ENVIRONMENT | {"host": "elsewhere"})
    assert "digits Not finished" in report(make_run(record=elsewhere)).text


HALVES = {
    "run.json": '{"status": "comp',
    "csv/metrics.csv": ROWS[:-2],
    ".hydra/config.yaml": "seed: 42\ntrainer: {max_ep",
    ".hydra/overrides.yaml": "- +recipe=digits\n- [",
    "fit.log": "[2026",
}


@pytest.mark.parametrize("name", HALVES)
def test_truncated_file_is_accepted(make_run, name):
    page = report(make_run(files={name: HALVES[name]}))
    assert "val_acc" in page.titles


def test_incomplete_row_is_left_out(make_run):
    page = report(make_run(files={"csv/metrics.csv": HALVES["csv/metrics.csv"]}))
    assert page.lines("val_acc")["val_acc"]["y"] == [0.25]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "[]"),
        ("run.json", {"status": 3, "metrics": [], "seconds": None, "peak_memory": None, "objective": 7}),
        ("run.json", {"environment": {"started": "now", "git": None, "pid": "x"}, "overrides": {}, "paths": 1}),
        ("run.json", {"curves": {"losses": 3, "metrics": [], "seconds": {"steps": None}, "scales": None}}),
        ("run.json", {"curves": [], "environment": "x", "throughput": 3, "gpu": []}),
        ("csv/metrics.csv", "a,b\n1,2\n"),
        ("csv/metrics.csv", "step,x\nnone,1\n1,many\n2,\n"),
        ("csv/metrics.csv", ""),
        (".hydra/config.yaml", "- a list\n"),
        (".hydra/overrides.yaml", "a: mapping\n"),
    ],
)
def test_files_of_another_format_are_accepted(make_run, name, content):
    assert report(make_run(files={name: content})).sections["environment"]


def test_run_with_only_a_record(make_run):
    others = ("csv/metrics.csv", ".hydra/config.yaml", ".hydra/overrides.yaml", "fit.log")
    record = facts(environment={}, curves={})
    page = report(make_run(record=record, files=dict.fromkeys([*others, "csv/diagnosis_step_2.md"])))
    assert page.titles == []
    assert "There is no metrics.csv" in page.sections["curves"]
    assert "There is no run.json" in page.sections["environment"]
    assert "There is no .hydra/config.yaml" in page.sections["settings"]


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        ("{}", "The run had no logger (logger=none)."),
        ("{tensorboard: {_target_: a}}", "the run was logged only by tensorboard. logger=csv"),
        ("{csv: {_target_: a}}", "the run ended before its first rows were written"),
    ],
)
def test_page_without_rows_has_a_note(make_run, logger, expected):
    config = f"trainer: {{max_epochs: 1}}\nlogger: {logger}\n"
    files = {"csv/metrics.csv": None, ".hydra/config.yaml": config}
    page = report(make_run(record=facts(curves={}), files=files))
    assert page.titles == []
    assert expected in page.sections["curves"]


def test_run_shorter_than_the_logging_interval(make_run):
    config = "trainer: {log_every_n_steps: 50}\nlogger: {csv: {_target_: a}}\n"
    page = report(make_run(files={"csv/metrics.csv": None, ".hydra/config.yaml": config}))
    assert "rows are written every 50 steps (trainer.log_every_n_steps), and the run had 4." in page.sections["curves"]


def test_speed_is_averaged(make_run):
    quick = CURVES | {"seconds": {"steps": [1, 2, 3, 4], "values": [1.0, 1.01, 1.02, 1.05]}}
    page = report(make_run(record=facts(curves=quick)))
    assert "Memory" in page.titles
    assert "Throughput" not in page.titles
    once = quick | {"memory": {"steps": [1], "values": [2**20]}}
    page = report(make_run("outputs/b/1", record=facts(curves=once)))
    assert "Memory" not in page.titles


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ("{scale_monitor: {_target_: a}}", "the run was too short (trainer.log_every_n_steps, callbacks.scale_"),
        ("{scale_monitor: {every_n_steps: 4}}", "add ScaleMonitor, which is in callbacks=default"),  # of a recipe
        ("null", "add ScaleMonitor, which is in callbacks=default"),
    ],
)
def test_page_without_scale_values_has_the_reason(make_run, callbacks, expected):
    files = {"csv/metrics.csv": "step,val_acc\n1,0.5\n"}
    page = report(
        make_run(
            record=facts(curves={}, skipped_steps=0, scale=None),
            files=files | {".hydra/config.yaml": f"callbacks: {callbacks}\n"},
        )
    )
    assert f"Loss scale and gradients were not logged: {expected}" in page.sections["curves"]


def test_large_scales_and_small_losses_have_powers_at_their_axes(make_run):
    curves = CURVES | {"losses": {"steps": [1, 2, 3, 4], "values": [1.0, 1e-3, 1e-5, 1e-7]}}
    html = report(make_run(record=facts(curves=curves))).html
    assert ">10\u207b\u2076<" in html
    assert ">2\u00b9\u2076<" in html
    assert "2^16" not in html


def test_axis_without_values_has_no_ticks(make_run):
    rows = "step,val_acc\n1,nan\n3,inf\n"
    html = report(make_run(record=facts(curves={}, skipped_steps=0, scale=None), files={"csv/metrics.csv": rows})).html
    chart = html[html.index("<h4>val_acc") :]
    assert "not finite, the first at step 1" in chart
    assert 'id="ytick' not in chart
    assert ">0.5<" not in chart[: chart.index("</svg>")]


def test_curves_without_rows(make_run):
    page = report(make_run(files={"csv/metrics.csv": None}))
    assert page.titles == ["Loss", "Loss scale", "Skipped steps", "Throughput", "Memory"]
    assert "There is no metrics.csv" in page.sections["curves"]


def test_values_that_are_not_finite(make_run):
    curves = CURVES | {"losses": {"steps": [1, 2, 3, 4], "values": [1.0, float("nan"), float("inf"), 2.0]}}
    page = report(make_run(record=facts(curves=curves)))
    assert "of the values" not in page.text
    assert "not finite, the first at step 2" in page.sections["curves"]
    assert "NaN" not in json.dumps(page.data)


def test_other_values_that_were_logged(make_run):
    rows = "epoch,reward,step,train_f1_epoch,train_f1_step,val_f1\n0,5.0,1,,0.1,\n0,,1,0.2,,0.3\n0,6.0,2,,0.4,\n"
    page = report(make_run(record=facts(curves={}, skipped_steps=0, scale=None), files={"csv/metrics.csv": rows}))
    assert page.titles == ["f1", "reward"]
    assert set(page.lines("f1")) == {"train_f1_epoch", "val_f1"}  # that of the step is drawn below, without a name


def test_run_of_another_command(make_run):
    record = facts(command="test", metrics={"test_acc": 0.5}, curves={}, skipped_steps=0)
    page = report(make_run(record=record, files={"csv/metrics.csv": None}))
    assert "There are no curves for the command test." in page.sections["curves"]
    assert "test_acc 0.5" in page.text


def test_page_uses_no_network_and_only_our_script(make_run):
    page = report(make_run())
    assert page.having("script", "src") == page.having("link", "href") == page.having("img", "src") == []
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-")
    assert len(page.scripts) == 1
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    style = page.html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


BAD = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&</style>"


def test_values_of_a_run_are_escaped(make_run):
    rows = f'epoch,step,"val_{BAD.replace(chr(34), chr(34) * 2)}"\n0,1,0.5\n0,2,0.75\n'
    where = ENVIRONMENT | {"host": BAD, "cpu": BAD, "versions": {BAD: BAD}, "command": [BAD]}
    record = facts(
        recipe=BAD, status=BAD, error=BAD, devices=BAD, metrics={f"val_{BAD}": 1.0}, overrides=[f"+recipe={BAD}", BAD],
        environment=where,
    )  # fmt: skip
    diagnosis = f"# {BAD}\n\n{BAD}\n\n- {BAD}\n\n| {BAD} | {BAD} |\n"
    page = report(
        make_run(
            record=record,
            files={
                "csv/metrics.csv": rows,
                ".hydra/config.yaml": json.dumps({BAD: {BAD: BAD}, "logger": {BAD: {}}}),
                "fit.log": f"[now][a][WARNING] - {BAD}\n",
                "csv/diagnosis_step_2.md": diagnosis,
            },
        )
    )
    assert len(page.scripts) == 1
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "iframe", "object", "embed", "base", "form"})
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert f"val_{BAD}" in page.titles
    assert page.text.count("<script>alert(1)</script>") > 10
    data = [part.partition("</script>")[0] for part in page.html.split('<script type="application/json">')[1:]]
    assert len(data) == len(page.data)
    assert not any("<" in part for part in data)


def test_names_of_files_are_escaped(make_run):
    folder = make_run()
    (folder / "a b&c#.txt").touch()
    page = report(folder)
    assert "./a%20b%26c%23.txt" in page.having("a", "href")


def test_secrets_are_not_in_the_page(make_run):
    redaction.remember("TOKEN", "hunter2hunter2")
    config = "logger: {wandb: {api_key: 0123abcd, token: '${oc.env:T}', tokens: 512, url: 'https://me:pw9@host/x'}}\n"
    try:
        page = report(
            make_run(
                record=facts(
                    overrides=["+logger.wandb.api_key=0123abcd", "a=hunter2hunter2"],
                    environment=ENVIRONMENT | {"command": ["x", "logger.wandb.api_key=0123abcd"]},
                ),
                files={
                    ".hydra/config.yaml": config,
                    "fit.log": "[now][a][WARNING] - got hunter2hunter2 from https://me:pw9@host/x\n",
                },
            )
        )
    finally:
        redaction.forget()
    for secret in ("hunter2hunter2", "0123abcd", "pw9"):
        assert secret not in page.html
    assert "logger.wandb.api_key=***" in page.text
    for expected in ("wandb.api_key ***", "wandb.token ${oc.env:T}", "wandb.tokens 512", "https://me:***@host/x"):
        assert expected in page.sections["settings"]


@pytest.mark.whole
def test_long_run_makes_a_page_of_moderate_size(make_run):
    names = [f"val_{index}" for index in range(8)]
    rows = [
        f"{step % 7},{step}," + ",".join(f"{(step * 37 % 101) / 101:.6f}" for _ in names) for step in range(100_000)
    ]
    rows[70_000] = rows[70_000].rpartition(",")[0] + ",9.5"
    folder = make_run(files={"csv/metrics.csv": "\n".join([f"epoch,step,{','.join(names)}", *rows, ""])})
    page = report(folder)
    assert len(page.html) < 600_000
    line = page.lines("val_7")["val_7"]
    assert len(line["x"]) <= 400
    assert (line["x"][0], line["x"][-1], line["x"][line["y"].index(9.5)]) == (0, 99_999, 70_000)


def test_fit_in_a_script(make_run):
    """A fit of a Trainer without the command line: no configs, all files in the logger's folder."""
    record = {
        "status": "completed",
        "steps": 4,
        "epochs": 2,
        "seconds": 3.5,
        "precision": "16-mixed",
        "metrics": {"a": 1},
    }
    others = dict.fromkeys([".hydra/config.yaml", ".hydra/overrides.yaml", "csv/metrics.csv", "fit.log"])
    folder = make_run("lightning_logs/version_0", record=record, files=others | {"metrics.csv": ROWS})
    page = report(folder)
    assert "version_0 Completed" in page.text
    assert "val_acc" in page.titles


def test_another_file(make_run, tmp_path):
    folder = make_run()
    page = report(folder, "pages/mine.html")
    assert isinstance(page, Page)
    assert "../outputs/digits/one/csv/metrics.csv" in page.having("a", "href")[-20:] or any(
        address.endswith("/outputs/digits/one/csv/metrics.csv") for address in page.having("a", "href")
    )
    assert not (folder / "report.html").exists()


@pytest.mark.whole
def test_no_torch(make_run):
    folder = make_run()
    code = (
        "import sys\nfrom trainer.cli import main\n"
        f"assert main(['report', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'lightning', 'pandas', 'hydra'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_path_of_the_page_is_printed(make_run, capsys):
    folder = make_run()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"The report is {Path(folder) / 'report.html'}\n"


def test_norms_of_layers_are_a_heat_map(make_run):
    rows = "grad_norm/net.0,grad_norm/net.2,grad_norm_step,step\n0.5,inf,,1\n,,3.0,2\n0.25,1e-9,,3\n0.125,nan,,5\n"
    page = report(make_run(files={"csv/metrics.csv": rows}))
    shown = page.data[page.titles.index("Gradient norm by layer")]["map"]
    assert shown["names"] == ["net.0", "net.2"]
    assert shown["steps"] == [1, 3, 5]
    assert shown["values"] == [[0.5, 0.25, 0.125], ["not finite", 1e-9, "not finite"]]
    assert "5.00e-07 0.5" in page.text.replace("5e-07", "5.00e-07")  # the colours end at a millionth of the largest
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
    assert "Shows the 100 layers with the largest values of 300." in page.text
    assert len(page.html) < 400_000


def test_heat_maps_are_not_on_pages_of_several_runs(make_run):
    rows = "grad_norm/net.0,step,val_acc\n0.5,1,\n,2,0.5\n"
    runs = [make_run(f"a/{number}", files={"csv/metrics.csv": rows}) for number in (1, 2)]
    assert main(["report", *map(str, runs)]) == 0
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert "val_acc" in page.titles
    assert not [data for data in page.data if "map" in data]
