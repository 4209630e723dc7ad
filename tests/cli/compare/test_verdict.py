"""The verdict on a run: numbers, words, thresholds and advice."""

import inspect
import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.cli.compare import Thresholds, assess, choose_metric
from trainer.cli.folders import packaged_conf
from trainer.cli.schema import read_settings
from trainer.record.run_record import RunRecord

GB = 2**30
ACC, LOSS = ("val_acc", "max"), ("val_loss", "min")


def labeled(label, facts):
    record = RunRecord(facts, Path())
    record.label = label
    return record


def run(precision="32-true", *, rate=100.0, memory=10 * GB, gpu=True, waiting=0.01, capability=(8, 0), tf32=(), **more):
    facts = {
        "status": "completed",
        "precision": precision,
        "peak_memory": {"gpu" if gpu else "process": memory},
        "gpu": {"capability": list(capability), "tf32": list(tf32)} if gpu else None,
        "samples_per_second": rate,
        "throughput": {"waiting": waiting, "measured_batches": 50},
        "metrics": {"val_acc": 0.9, "val_loss": 0.5},
    }
    return labeled(precision, facts | more)


@pytest.mark.parametrize(
    ("metric", "value", "reference", "clause", "met"),
    [
        (ACC, 0.9, 0.9, "the same val_acc as 32-true", True),
        (ACC, 0.89, 0.9, "val_acc within 1.0 points of 32-true", True),
        (ACC, 0.889, 0.9, "val_acc 1.1 points below 32-true", False),
        (ACC, 0.95, 0.9, "val_acc 5.0 points above 32-true", True),  # better is no failure
        (LOSS, 0.51, 0.5, "val_loss 2.0% above 32-true", False),
        (LOSS, 0.1, 0.0, "val_loss is 0.1 (32-true: 0)", False),
        (("val_bleu", "max"), 30.0, 31.0, "val_bleu 3.3% below 32-true", False),
        (ACC, math.nan, 0.9, "val_acc is nan (32-true: 0.9)", False),
        (ACC, 0.9, math.nan, "val_acc is 0.9 (32-true: nan)", True),
    ],
)
def test_metric(metric, value, reference, clause, met):
    first = run(metrics={metric[0]: reference}, gpu=False)
    verdict = assess(run("16-mixed", metrics={metric[0]: value}, gpu=False), first, metric, Thresholds())
    assert verdict.text == f"{clause}, as fast."
    assert verdict.met is met
    assert len(verdict.advice) == (not met)


def test_tolerance_is_the_users():
    first, other = run(gpu=False, metrics={"val_acc": 0.9}), run("16-mixed", gpu=False, metrics={"val_acc": 0.87})
    limits = {2.0: False, 3.0: True, None: True}
    assert {one: assess(other, first, ACC, Thresholds(accuracy_tolerance=one)).met for one in limits} == limits


def test_metric_that_a_run_did_not_log():
    verdict = assess(run("16-mixed", metrics={}, rate=200.0, memory=5 * GB), run(), ACC, Thresholds())
    assert verdict.text == "no val_acc to compare, 2.00x faster, 50.0% less memory."
    assert not verdict.met  # undecidable
    assert verdict.advice == ("val_acc was not logged by both runs.",)


SLOW, LARGE = "Less than 1.5x as fast as 32-true.", "Saves less than 30% of the memory. Mixed precision keeps weights"


@pytest.mark.parametrize(
    ("rate", "memory", "text", "reason"),
    [
        (150.0, 5, "1.50x faster, 50.0% less memory.", ""),
        (149.9, 5, "1.50x faster, 50.0% less memory.", SLOW),
        (50.0, 5, "2.00x slower, 50.0% less memory.", SLOW),
        (200.0, 7, "2.00x faster, 30.0% less memory.", ""),
        (200.0, 7.5, "2.00x faster, 25.0% less memory.", LARGE),
        (200.0, 10, "2.00x faster, as much memory.", LARGE),
    ],
)
def test_speed_and_memory_on_a_gpu(rate, memory, text, reason):
    verdict = assess(run("16-mixed", rate=rate, memory=memory * GB), run(), None, Thresholds())
    assert verdict.text == text
    assert verdict.met is (not reason)
    assert (verdict.speedup, verdict.memory_saving) == (rate / 100, pytest.approx(1 - memory / 10))
    assert [line.startswith(reason) for line in verdict.advice] == [True] * bool(reason)


def test_cpu_has_no_thresholds_for_speed_and_memory():
    verdict = assess(run("16-mixed", rate=50.0, memory=11 * GB, gpu=False), run(gpu=False), None, Thresholds())
    assert verdict.text == "2.00x slower."
    assert verdict.met
    limits = Thresholds(min_speedup=1.0, min_memory_saving=0)
    strict = assess(run("16-mixed", rate=50.0, memory=11 * GB, gpu=False), run(gpu=False), None, limits)
    assert strict.text == "2.00x slower, 10.0% more memory."
    assert strict.advice == ("Less than 1x as fast as 32-true.", "Saves less than 0% of the memory.")


def test_thresholds_apply_to_16_bits_against_more_only():
    first = run("bf16-mixed")
    for name in ("16-mixed", "32-true", "64-true"):
        assert assess(run(name, rate=50.0), first, None, Thresholds()).met
    assert assess(run("64-true", rate=50.0), run("32-true"), None, Thresholds()).met
    assert not assess(run("bf16-true", rate=50.0), run("32-true"), None, Thresholds()).met
    assert not assess(run("16-mixed"), first, None, Thresholds(min_speedup=1.1)).met
    assert assess(run("16-mixed"), run(), None, Thresholds(min_speedup=None, min_memory_saving=None)).met


@pytest.mark.parametrize(
    ("of_run", "of_first", "reason"),
    [
        ({}, {}, "Usual reasons: a GPU without Tensor Cores"),
        ({"waiting": 0.62}, {}, "The loop waited for batches 62% of the time"),
        ({}, {"tf32": ["convolutions"]}, "32-true used Tensor Cores too: TF32 in convolutions."),
    ],
)
def test_why_a_gpu_is_not_faster(of_run, of_first, reason):
    (advice, _) = assess(run("bf16-mixed", **of_run), run(**of_first), None, Thresholds()).advice
    assert reason in advice
    assert advice.count("Usual reasons") == 1


def test_run_without_measurements():
    verdict = assess(run("16-mixed", rate=None, throughput=None, peak_memory={}), run(), None, Thresholds())
    assert verdict.text == "no figure was measured in both runs."
    assert (verdict.met, verdict.advice, verdict.speedup, verdict.memory_saving) == (True, (), None, None)


def test_final_loss_is_the_mean_of_the_last_tenth():
    def with_losses(losses):
        return run(curves={"losses": {"steps": list(range(len(losses))), "values": losses}})

    assert with_losses([9.0] * 18 + [1.0, 2.0]).final_loss == 1.5
    assert with_losses([9.0] * 19 + [1.0, 2.0]).final_loss == pytest.approx(4.0)
    assert with_losses([3.0]).final_loss == 3.0
    assert math.isnan(with_losses([3.0, math.nan]).final_loss)
    assert run().final_loss is None


@pytest.mark.parametrize(
    ("logged", "settings", "monitor", "name", "higher"),
    [
        (["val_loss", "val_f1"], {}, None, "val_f1", True),
        (["val_loss", "val_wer"], {}, None, "val_loss", False),
        (["val_acc_step", "val_acc_epoch", "val_acc"], {}, None, "val_acc", True),
        (["val_loss", "val_acc"], {}, {"metric": "val_loss", "mode": "min"}, "val_loss", False),
        (["val_loss", "score"], {"mode": "min"}, {"metric": "score", "mode": "max"}, "score", False),
        (["val_loss", "val_acc"], {"metric": "val_loss"}, {"metric": "val_acc", "mode": "max"}, "val_loss", False),
        (["val_energy"], {"metric": "val_energy", "mode": "min"}, None, "val_energy", False),
        (["lr-SGD", "train_loss"], {}, None, None, None),
    ],
)
def test_which_metric(logged, settings, monitor, name, higher):
    runs = [run(metrics=dict.fromkeys(logged, 0.5), monitor=monitor)] * 2
    metric, remark = choose_metric(runs, Thresholds(**settings))
    assert remark is None
    assert (metric and metric[0], metric and metric[1] == "max") == (name, higher)


def test_objective_is_compared_at_the_best_checkpoint():
    best = {"monitor": {"metric": "val_acc", "mode": "max"}}
    first, other = run(best_score=0.95, **best), run("bf16-mixed", best_score=0.94, **best)
    assert assess(other, first, ACC, Thresholds()).text.startswith("val_acc within 1.0 points of 32-true")


def test_missing_metric_is_reported_and_replaced():
    metric, remark = choose_metric([run()], Thresholds(metric="val_ac"))
    assert metric == ACC
    assert "compare.metric is val_ac, which no run logged. Did you mean 'val_acc'?" in remark


def test_default_settings_equal_the_config():
    shipped = OmegaConf.to_container(OmegaConf.load(packaged_conf() / "compare" / "default.yaml"))
    assert read_settings(Thresholds, "compare", shipped) == Thresholds()
    assert list(shipped) == list(inspect.signature(Thresholds).parameters)
