"""The harness of ``scripts/fault_suite`` is in ``scripts/_faults``, which the tests import."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
