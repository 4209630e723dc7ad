"""A resumed run of two processes against the run that was never interrupted: every value that is reachable, by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import census_worker
from tests.distributed.ranks import Ranks
from tests.support import needs_fsdp2

COMPARE = "tests.distributed.census_worker:compare"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_fsdp2] * name.startswith("fsdp")) for name in census_worker.CASES]
)
def test_state_is_equal_after_a_resume(ranks: Ranks, name: str, tmp_path: Path) -> None:
    found = ranks.call(COMPARE, name, str(tmp_path))
    assert found == [[], []], "\n".join(f"rank {rank}, {line}" for rank, lines in enumerate(found) for line in lines)
