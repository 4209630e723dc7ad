"""``tune batch_size``: decisions from the results of its processes, and whole runs with real ones."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main, tune
from trainer.cli.parsing import UsageError, read
from trainer.cli.tune import Settings, TuneError, find, precisions_in

OK = {"status": "ok", "device": "CPU", "precision": "32-true", "memory": 2**20, "skipped": 0, "samples": 1000}


def answer(size, **changes):
    return {**OK, "batch": size, "samples_per_second": 100.0 + size, "memory": size * 2**20, **changes}


def out_of_memory(size):
    return {"status": "out of memory", "error": f"OutOfMemoryError: tried to allocate {size} GiB", "memory": None}


def run(attempt, start=64, are_given=True, folder=Path("run"), **settings):
    return find("32-true", attempt, start, Settings(**settings), are_given=are_given, folder=folder)


def search(capacity, start=64, samples=10**9, **settings):
    """Search with this largest size that fits."""

    def attempt(size):
        return answer(size, samples=samples) if size <= capacity else out_of_memory(size)

    return run(attempt, start, **{"multiple_of": 1} | settings)


def sizes(found):
    return [one["size"] for one in found["tried"]]


def test_dataset_without_a_length_ends_when_batches_stop_growing():
    found = run(lambda size: answer(size, batch=min(size, 200), samples=None))
    assert (found["largest"], sizes(found)) == (200, [64, 128, 256])


def test_setting_that_is_not_the_batch_size():
    with pytest.raises(UsageError, match=r"data\.batch_size is 64, but the batches have 32 samples"):
        run(lambda size: answer(32))


@pytest.mark.parametrize("is_usage", [True, False])
def test_another_failure_ends_it_with_its_message(is_usage):
    def attempt(size):
        message = {"status": "failed", "error": "ValueError: no labels", "is_usage": is_usage, "is_precision": False}
        return answer(size) if size < 128 else message

    with pytest.raises(UsageError if is_usage else TuneError, match="ValueError: no labels"):
        run(attempt)


def test_unsupported_precision_is_a_row_unless_it_was_requested():
    message = {"status": "failed", "error": "no float16 here", "is_usage": True, "is_precision": True}
    found = run(lambda size: message, are_given=False)
    assert (found["problem"], found["largest"], found["tried"]) == ("no float16 here", 0, [])
    with pytest.raises(UsageError, match="no float16 here"):
        run(lambda size: message, are_given=True)


@pytest.mark.parametrize(
    ("words", "precisions"),
    [
        ([], ["32-true", "16-mixed", "bf16-mixed"]),
        (["precision=bf16"], ["bf16-mixed"]),
        (["precision=16, 32"], ["16-mixed", "32-true"]),
        (["precision={_target_: a.B, c: 1}"], ["{_target_: a.B, c: 1}"]),
    ],
)
def test_precisions(words, precisions):
    assert precisions_in(read(["tune", "batch_size", *words]).overrides) == precisions


@pytest.mark.parametrize("start", [1, 7, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 3, 63, 100, 1025])
def test_search_is_exact(capacity, start):
    found = search(capacity, start)
    assert found["largest"] == capacity
    assert len(set(sizes(found))) == len(found["tried"]) <= 24
    assert min(sizes(found)) >= 1


@pytest.mark.parametrize(
    ("found", "tried"),
    [
        (search(100, 16), [16, 32, 64, 128, 96, 112, 104, 100, 102, 101]),
        (search(100, 50, multiple_of=8), [50, 100, 200, 144, 120, 104]),
        (search(10**9, samples=1257), [64, 128, 256, 512, 1024, 1257]),
        (search(10**9, samples=1257, max_batch_size=200), [64, 128, 200]),
        (search(10**9, max_batch_size=64), [64]),
    ],
)
def test_order_of_the_tries(found, tried):
    assert sizes(found) == tried


@pytest.mark.parametrize(("capacity", "found"), [(100, 96), (96, 96), (95, 88), (7, 7), (8, 8), (15, 8)])
def test_multiples_of_eight_and_below_it_any(capacity, found):
    assert search(capacity, multiple_of=8)["largest"] == found


# --- whole runs -----------------------------------------------------------------------------------------------

HUNGRY = '''
import torch

from line_fit import Line


class Hungry(Line):
    """Raises an error above ten samples."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.loss(batch)
'''

MODEL = "_target_: hungry.Hungry\noptimizer: ${optimizer}\n"


@pytest.fixture
def hungry(project, executable_is_warm):
    write(project, {"hungry.py": HUNGRY, "conf/model/hungry.yaml": MODEL})
    return ["tune", "batch_size", "+recipe=line", "model=hungry", "callbacks=default", "tune.multiple_of=1"]


def tune_json():
    (file,) = Path("outputs").rglob("tune.json")
    return json.loads(file.read_text())


@pytest.mark.whole
def test_out_of_memory_above_ten_samples_finds_ten(hungry, capfd):
    assert main([*hungry, "precision=16"]) == 0
    (result,) = tune_json()["results"]
    assert (result["precision"], result["largest"]) == ("16-mixed", 10)
    assert [one["size"] for one in result["tried"]] == [4, 8, 16, 12, 10, 11]
    fits = [one for one in result["tried"] if one["status"] == "ok"]
    assert all(one["samples_per_second"] > 0 and one["memory"] > 2**20 for one in fits)
    out = capfd.readouterr().out
    assert "data.batch_size=16 in precision=16-mixed: out of memory. OutOfMemoryError: CUDA out of memory." in out
    assert "\nprecision=16-mixed data.batch_size=10\n" in out
    assert {file.name for file in Path("outputs").rglob("*") if file.is_file()} == {"tune.json", "tune.log"}
    assert {file.name for file in Path().iterdir()} - {"__pycache__"} == {"conf", "hungry.py", "line_fit.py", "outputs"}


def test_table(project, capsys, monkeypatch):
    answers = {"32-true": 10, "16-mixed": 14, "bf16-mixed": 0}

    def attempt(config, settings, folder, size):
        capacity = answers[config.hydra.runtime.choices.precision]
        return answer(size, samples=16) if size <= capacity else out_of_memory(size)

    monkeypatch.setattr(tune, "attempt_size", attempt)
    assert main(["tune", "batch_size", "+recipe=line", "tune.multiple_of=1", "tune.memory=1GiB"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "32-true 10 110 10 MiB" in out
    assert "16-mixed 14 114 14 MiB" in out
    assert "bf16-mixed none - -" in out
    assert "precision=16-mixed data.batch_size=14" in out
    assert "precision=bf16-mixed: not even one sample fits." in out
    result = tune_json()
    assert (result["key"], result["settings"]["memory"], result["seed"]) == ("data.batch_size", "1GiB", 42)
    assert {one["precision"]: one["largest"] for one in result["results"]} == answers
