"""Several ranks evaluate each sample once with uneven inputs, and log the values of one process.

The ranks are started once for all tests; results are read from a file.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import evaluation_worker as worker
from tests.distributed.test_ddp import load, run
from tests.warm_python import WarmPython

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


@pytest.fixture(scope="module")
def launched(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("evaluation")
    output, _ = run(python, folder, "torchrun", script=Path(worker.__file__))
    return output, load(folder)


@pytest.fixture(scope="module")
def ranks(launched: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return launched[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return worker.scenarios(tmp_path_factory.mktemp("alone"), 1)


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("name", [*worker.PASSES, "test"])
def test_logged_values_of_several_ranks_equal_those_of_one_process(
    ranks: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    """Means, sums, extremes and metric objects, with and without ``sync_dist``; a rank may have no batch."""
    expected = alone[name]
    assert sorted(x for rank in ranks for x in rank[name]["seen"]) == sorted(expected["seen"])
    for rank in ranks:
        found = rank[name]["results"]
        assert len(found) == len(expected["results"])
        for mine, theirs in zip(found, expected["results"], strict=True):
            assert_same(mine, theirs if name != "seven by two" else theirs | {"rare": 6.0})  # that is of the batch
    assert_same(ranks[1][name].get("callback_metrics", {}), ranks[0][name].get("callback_metrics", {}))


def test_three_processes(python: WarmPython, tmp_path: Path, alone: dict[str, Any]) -> None:
    run(python, tmp_path, "torchrun", script=Path(worker.__file__), processes=3)
    ranks = load(tmp_path, 3)
    for name in worker.MORE:
        assert sorted(x for rank in ranks for x in rank[name]["seen"]) == sorted(alone[name]["seen"])
        for rank in ranks:
            for mine, theirs in zip(rank[name]["results"], alone[name]["results"], strict=True):
                assert_same(mine, theirs)
    assert [rank["four"]["seen"] for rank in ranks] == [[0.0, 3.0], [1.0], [2.0]]


def test_five_samples_on_two_processes(ranks: list[dict[str, Any]]) -> None:
    assert [rank["five"]["seen"] for rank in ranks] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert [rank["five"]["results"][0]["mean"] for rank in ranks] == [2.0, 2.0]
    assert [rank["one"]["seen"] for rank in ranks] == [[0.0], []]


def test_hooks_run_for_the_batches_of_a_process(ranks: list[dict[str, Any]]) -> None:
    for rank, batches in zip(ranks, (3, 2), strict=True):
        assert rank["five"]["hooks"] == [f"{what} 0 {i}" for i in range(batches) for what in ("start", "end")]
    assert ranks[1]["one"]["hooks"] == []


def test_number_of_batches_is_that_of_the_process_that_has_the_most(ranks: list[dict[str, Any]]) -> None:
    """Callbacks use it to decide whether there is a validation."""
    for rank in ranks:
        assert rank["five"]["num_val_batches"] == [3]
        assert rank["one"]["num_val_batches"] == [1]
        assert rank["several"]["num_val_batches"] == [2, 1, 2]


def test_values_of_single_batches_are_reduced_if_both_ranks_have_the_batch(ranks: list[dict[str, Any]]) -> None:
    """Ranks have the values 0 and 1, 2 and 3, and 4 alone. With unknown lengths no value is reduced."""
    assert [rank["five"]["each"] for rank in ranks] == [[0.5, 2.5, 4.0], [0.5, 2.5]]
    assert [rank["stream"]["each"] for rank in ranks] == [[0.0, 2.0, 4.0], [1.0, 3.0]]


@pytest.mark.parametrize("name", ["limit 1", "limit 0.5", "limit 0.5 of three"])
def test_limits_count_the_batches_of_a_process(ranks: list[dict[str, Any]], name: str) -> None:
    for number, rank in enumerate(ranks):
        assert rank[name]["seen"] == [float(number)]
        assert rank[name]["results"][0]["mean"] == 0.5


def test_padding_is_lightnings(ranks: list[dict[str, Any]]) -> None:
    """Both ranks have the same number of samples, one of them twice.

    Without ``sync_dist`` each rank has its own value.
    """
    assert [rank["padded"]["seen"] for rank in ranks] == [[0.0, 2.0, 4.0], [1.0, 3.0, 0.0]]
    for rank, own in zip(ranks, (2.0, 4 / 3), strict=True):
        results = rank["padded"]["results"][0]
        assert results["mean"] == pytest.approx(10 / 6, abs=1e-6)
        assert results["plain"] == pytest.approx(own, abs=1e-6)


def test_samplers_divided_by_the_user_are_kept(ranks: list[dict[str, Any]]) -> None:
    assert [rank["own sampler"]["seen"] for rank in ranks] == [[0.0, 2.0, 4.0], [1.0, 3.0, 0.0]]
    assert [rank["not divided"]["seen"] for rank in ranks] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_predictions_are_those_of_each_process(ranks: list[dict[str, Any]]) -> None:
    assert [rank["predict 5"] for rank in ranks] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert [rank["predict 1"] for rank in ranks] == [[0.0], []]


@pytest.mark.parametrize("name", ["fit 5", "fit 1"])
def test_fit_chooses_its_checkpoint_by_the_whole_data(
    ranks: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["best"] == second["best"]
    assert Path(first["best"]).name == Path(alone[name]["best"]).name
    assert first["score"] == second["score"] == alone[name]["score"]
    own = {"train_loss", "of_rank", "output"}  # another BatchNorm
    assert_same(
        {k: v for k, v in first["metrics"].items() if k not in own},
        {k: v for k, v in alone[name]["metrics"].items() if k not in own},
    )
    assert_same(first["metrics"], second["metrics"])


def test_ranks_agree_on_signals_at_different_batches(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Checked before each batch of three dataloaders. In each of them, one rank has one batch more."""
    for rank in ranks:
        assert rank["fit several"]["score"] == alone["fit several"]["score"] == 2.0


def test_steps_that_draw_their_batches(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for count, mean in ((5, 2.0), (1, 0.0)):
        for found in (alone, *ranks):
            assert found[f"drawn {count}"] == [{"mean": mean}]


def test_values_logged_by_one_rank_lead_to_the_same_decisions(ranks: list[dict[str, Any]]) -> None:
    """``of_rank`` is 0 on rank 0, and 1 on rank 1. A plateau schedule per rank would set two rates."""
    for rank in ranks:
        assert rank["fit 5"]["metrics"]["of_rank"] == 0.0
    assert ranks[0]["fit 5"]["lr"] == ranks[1]["fit 5"]["lr"]


def test_all_processes_evaluate_with_the_buffers_of_the_first(ranks: list[dict[str, Any]]) -> None:
    """The buffers of BatchNorm change in each epoch; rank 1 has no batch before the last dataloader."""
    first, second = (rank["fit 5"]["running"] for rank in ranks)
    assert first[2:5] == first[2:3] * 3  # after two batches of the sanity check
    assert second[2:4] == first[2:4]
    assert second[4:6] == first[5:7]
    assert first[2] != first[5]


def test_validations_inside_an_epoch(ranks: list[dict[str, Any]]) -> None:
    """After each of 2 batches of 3 epochs, and after 2 batches of a sanity check."""
    assert [len(rank["fit interval"]["seen"]) for rank in ranks] == [2 + 6 * 3, 2 + 6 * 2]


@pytest.mark.parametrize("how", ["gather", "raw", "on step"])
def test_collectives_in_each_batch_are_refused_with_uneven_inputs(ranks: list[dict[str, Any]], how: str) -> None:
    """By ``self.all_gather``, ``torch.distributed``, and a metric object, on both ranks."""
    for rank in ranks:
        told = rank[f"failure {how}"]["raised"]
        assert told.startswith("ConfigurationError: The ")
        assert "for each batch, but they have different numbers of batches (2 to 3)" in told
        assert "Trainer(pad_evaluation=True)" in told
    assert "'eager', with dist_sync_on_step=True" in ranks[0]["failure on step"]["raised"]


def test_lists_of_different_lengths_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        told = rank["failure lists"]["raised"]
        assert "The metric 'lists' (RetrievalMAP) keeps 'indexes' as a list of tensors, 3, 2 of them" in told
        assert "Trainer(pad_evaluation=True)" in told
        assert rank["failure lists, even"]["results"]


def test_exchange_in_the_first_batch_is_warned_of(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        found = rank["failure gather in the first"]
        assert found["results"][0]["mean"] == 2.0
        about = [text for text in found["warned"] if "different numbers of batches" in text]
        assert len(about) == (number == 0)


@pytest.mark.parametrize("name", ["gather, even", "gather, padded", "on step, padded"])
def test_collectives_in_each_batch_work_with_even_inputs(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[f"failure {name}"]["results"][0]["in_hook"] > 0
        assert not [text for text in rank[f"failure {name}"]["warned"] if "different numbers" in text]


def test_no_warnings_of_this_package(launched: tuple[str, list[dict[str, Any]]]) -> None:
    """Lightning's warning about ``sync_dist`` appears once, if the data is padded."""
    meant = ("'of_rank'", "samples in targets", "shuffling enabled", "is deprecated")
    warned = [
        line for line in launched[0].splitlines() if "Warning" in line and not any(text in line for text in meant)
    ]
    found = sorted(line.split("`self.log(")[-1].split(",")[0] for line in warned)
    assert found == ["'in_hook'", "'min'", "'plain'", "'plain_sum'", "'rare'"]


@pytest.mark.parametrize("name", worker.SHARDED)
def test_sharded_engine_is_kept_in_step(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    if f"sharded {name}" not in ranks[0]:
        pytest.skip("of torch 2.13")
    for rank in ranks:
        found = rank[f"sharded {name}"]
        assert found["seen"] == rank[name]["seen"]
        for mine, theirs in zip(found["results"], alone[name]["results"], strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("count", [5, 1])
def test_sharded_fit_chooses_as_any_other(ranks: list[dict[str, Any]], count: int) -> None:
    if "sharded fit 5" not in ranks[0]:
        pytest.skip("of torch 2.13")
    for rank in ranks:
        found, ddp = rank[f"sharded fit {count}"], rank[f"fit {count}"]
        assert_same(found["metrics"], ddp["metrics"])
        assert found["score"] == ddp["score"]
        assert found["lr"] == ddp["lr"]
        assert found["running"] == pytest.approx(ddp["running"], abs=1e-6)
        assert rank["sharded predict"] == rank["predict 5"]


@pytest.mark.parametrize("how", ["gather", "raw"])
def test_collectives_of_a_sharded_forward_are_not_counted(ranks: list[dict[str, Any]], how: str) -> None:
    if "sharded fit 5" not in ranks[0]:
        pytest.skip("of torch 2.13")
    for rank in ranks:
        assert "for each batch, but they have different numbers" in rank[f"failure sharded {how}"]["raised"]
        assert rank["failure sharded gather, even"]["results"][0]["mean"] == 1.5
