"""Lists of batches are divided among the processes; other batch samplers work or are refused."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import RankError, Ranks

RUN = "tests.distributed.batch_samplers:run"


@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
def test_each_batch_of_a_list_goes_to_one_process(ranks: Ranks, what: str) -> None:
    (first, *of_first), (second, *of_second) = ranks.call(RUN, what)
    assert (first, second) == ([[6, 2], [0, 1, 5]], [[4]])
    if what == "predict":
        assert (of_first[0], of_second[0]) == ([[6, 2], [0, 1, 5]], [[4]])
    elif what != "fit":
        assert of_first[1] == of_second[1] == {"mean": pytest.approx((6 + 2 + 4 + 0 + 1 + 5) / 6)}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("fit", "shuffled"),
        ("fit", "made by the module"),
        ("validate", "in order"),
        ("test", "made by the module"),
        ("predict", "in order"),
    ],
)
def test_torchs_batch_sampler_keeps_its_batch_size_and_its_order(ranks: Ranks, what: str, kind: str) -> None:
    (first, *_), (second, *_) = ranks.call(RUN, what, kind)
    assert [len(batch) for batch in (*first, *second)] == [2, 2, 2, 2]
    if what == "fit":
        assert sorted(number for batch in (*first, *second) for number in batch) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert first != [[0, 2], [4, 6]]
    else:
        assert (first, second) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])


@pytest.mark.parametrize("what", ["fit", "predict"])
def test_batch_sampler_that_cannot_be_divided_is_refused(ranks: Ranks, what: str) -> None:
    named = "Pass a list of batches" if what == "predict" else "use_distributed_sampler=False"
    with pytest.raises(RankError, match=named):
        ranks.call(RUN, what, "own")
