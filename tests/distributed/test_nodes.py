"""Several nodes, by torchrun and by stand-ins for Slurm: cases of ``scripts/fault_suite``, made short."""

from dataclasses import replace

import pytest
from _faults.bench import Bench
from _faults.cases import CASES, ELASTIC, TWO, node_killed, node_lost, run_case, sigterm_one_rank

from tests.support import needs_deepspeed, needs_fsdp2

SHORT = replace(TWO, batches=8, epochs=1, workers=0, pace=0.0, validate_every=3)


@pytest.fixture(scope="module")
def bench(tmp_path_factory, python):
    bench = Bench(tmp_path_factory.mktemp("nodes"), python=str(python.executable))
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="ddp", marks=pytest.mark.nightly),
        pytest.param({"trainer": {"strategy": "fsdp"}, "files": {"sharded": True}}, id="fsdp", marks=needs_fsdp2),
        pytest.param(
            {"trainer": {"strategy": "deepspeed_stage_3"}, "files": {"sharded": True}},
            id="deepspeed",
            marks=[needs_deepspeed, pytest.mark.nightly],
        ),
    ],
)
def test_job_of_two_nodes_with_a_killed_process_is_resumed_exactly(bench, options):
    outcome = node_killed(SHORT, **options)(bench, "ours")
    assert outcome.word == "exact", str(outcome)


def test_job_with_a_lost_node_continues_on_the_others(bench):
    setup = replace(ELASTIC, batches=12, epochs=1, validate_every=0)
    outcome = node_lost(setup, times=1, comes_back=False, patience=5)(bench, "ours")
    assert outcome.word == "exact", str(outcome)


@needs_fsdp2
@pytest.mark.nightly  # test_interruption.py and test_checkpoints.py check it in short
def test_signal_to_one_of_two_sharded_ranks_ends_both_and_is_resumed(bench):
    outcome = sigterm_one_rank(SHORT, trainer={"strategy": "fsdp"}, files={"sharded": True})(bench, "ours")
    assert outcome.good, str(outcome)


def test_requeued_slurm_job_is_resumed_exactly(bench):
    outcome = run_case(CASES["slurm-requeue"], bench, "ours")
    assert outcome.good, str(outcome)
