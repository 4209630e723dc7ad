"""A rank fails while the other waits for it: both end soon, and report the failed rank."""

import re

import pytest

from tests.distributed import failing_worker
from tests.distributed.ranks import run_program
from tests.support import needs_deepspeed, needs_fsdp2

RAISED = r"(?s)ValueError: rank 0 has failed.*has not exited, and is killed"
KILLED = r"Rank 1 \(process .*was killed by SIGKILL\. The others end, too\."
DIED = r"has died during the run\. Local rank 1 cannot continue without it, and exits\."


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("ddp 0 training raises", 1, RAISED),
        ("ddp 0 training dies", -9, DIED),
        ("ddp 1 setup dies", 1, KILLED),
        pytest.param("fsdp 1 training dies", 1, KILLED, marks=needs_fsdp2),
        pytest.param("deepspeed 1 training dies", 1, KILLED, marks=[needs_deepspeed, pytest.mark.nightly]),
    ],
)
def test_failed_rank_is_named_and_ends_a_sleeping_rank(request, case, status, message):
    python = request.getfixturevalue("python_with_deepspeed" if "deepspeed" in case else "python")
    ended, output = run_program(python, failing_worker.__file__, *case.split(), timeout=100)
    assert ended == status
    assert re.search(message, output)
