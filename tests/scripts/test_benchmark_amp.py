"""The benchmark runs on a CPU, trains the same by hand and with our Trainer, and writes its tables."""

import gc
import re

import pytest
import torch

from tests.scripts.conftest import loaded

CPU = torch.device("cpu")
PRECISIONS = ("32-true", "16-unscaled", "16-mixed", "bf16-mixed")


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module."""
    with loaded("benchmark_amp") as module:
        gc.freeze()  # the script collects garbage between runs; exclude the objects of pytest and torch
        yield module
        gc.unfreeze()


def test_writes_its_tables(table):
    sizes = "--batch 8 --width 16 --layers 2 --batches 3 --epochs 1 --rounds 2 --square 32 --resnet50 0"
    text = table("benchmark_amp", f"--device cpu {sizes}", "benchmark_amp cpu")
    time, change = r"[\d.]+ ± [\d.]+", r"[+-][\d.]+% ± [\d.]+%"
    for precision in PRECISIONS:
        for optimizer in ("SGD", "SGD, fused"):
            assert re.search(rf"\| {precision} \| {optimizer} \| {time} \| {time} \| {change} \| [\d.]+ \|", text)
        assert re.search(rf"\| {precision} \| [\d.]+ \| [\d.]+ \| {change} \|\n", text)  # batch 9 in addition to 8
    assert f"`scripts/benchmark_amp --device cpu {sizes}`: 2 layers" in text
    assert "ended with the same weights, to the bit, in every round." in text


def test_flops_are_those_of_the_products(benchmark):
    sizes = benchmark.Sizes(batch=5, width=16, layers=3, batches=1, epochs=1)
    # three products forward, three for the weights' gradients, two for the inputs': the first layer's needs none
    assert sizes.flops(5) == 8 * 2 * 5 * 16 * 16


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.01, 1.02, 1.03], "met"), ([1.10, 1.11, 1.12], "missed"), ([1.00, 1.04, 1.08, 1.06], "inconclusive")],
)
def test_verdicts(benchmark, ratios, expected):
    assert benchmark.verdict(ratios, 0.05 + 1e-9) == expected


def test_targets_are_those_of_scaling_and_of_the_framework(benchmark):
    given = benchmark.parse(["--device", "cpu", "--precision", "16-unscaled", "16-mixed", "--fused", "no"])
    seconds = {("16-unscaled", "hand-written"): 2.0, ("16-unscaled", "ours"): 2.0, ("16-mixed", "hand-written"): 2.0}
    results = benchmark.Measurements([])
    for precision, loop in [*seconds, ("16-mixed", "ours")]:
        variant = benchmark.Variant(precision, False, 4, loop)
        results.runs[variant] = [benchmark.Run(seconds.get((precision, loop), 3.0), 0.0, 0, 0)]
    assert benchmark.targets(results, benchmark.Sizes(4, 4, 1, 1, 1), given) == [
        ["16-mixed over 16-unscaled, SGD", "+5%", "+50.0% ± 0.0%", "missed"],
        ["ours over the best hand-written loop (SGD), 16-unscaled", "+2%", "+0.0% ± 0.0%", "met"],
        ["ours over the best hand-written loop (SGD), 16-mixed", "+2%", "+50.0% ± 0.0%", "missed"],
    ]


def test_float16_on_a_cpu_is_compared_with_float32(benchmark, monkeypatch):
    """In interleaved rounds of ResNet-50, on this CPU."""
    given = benchmark.parse(
        ["--device", "cpu", "--rounds", "1", "--resnet50", "3", "--precision", "32-true", "--fused", "no"]
    )
    sizes, order, seconds = benchmark.Sizes(2, 4, 1, 1, 1), [], {"32-true": 2.0, "16-mixed": 3.2}
    monkeypatch.setattr(benchmark, "resnet50_seconds", lambda n, name, _: order.append((n, name)) or seconds[name])
    results = benchmark.measure(
        [benchmark.Variant("32-true", False, 2, loop) for loop in ("hand-written", "ours")], sizes, given, CPU
    )
    assert order == [(3, name) for name in ("32-true", "16-mixed", "16-mixed", "32-true", "32-true", "16-mixed")]
    row = ["16-mixed over 32-true, ResNet-50 on the digits, this CPU", "+50%", "+60.0% ± 0.0%", "missed"]
    assert benchmark.targets(results, sizes, given)[-1] == row


def test_ratios_are_taken_within_a_round(benchmark):
    a, b = (benchmark.Variant("16-mixed", True, 4, loop) for loop in ("ours", "hand-written"))
    results = benchmark.Measurements([a, b])
    results.runs[a] = [benchmark.Run(seconds, 0.0, 0, 0) for seconds in (2.0, 9.0, 3.0)]
    results.runs[b] = [benchmark.Run(seconds, 0.0, 0, 0) for seconds in (1.0, 9.0, 2.0)]
    assert results.ratios(a, b) == [2.0, 1.0, 1.5]
