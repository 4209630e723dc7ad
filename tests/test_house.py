"""The house keeps its own rules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "trainer").rglob("*.py"))


def foreign_private_names(source: str) -> list[str]:
    """``object._name`` where the object is not ``self`` or ``cls``, and imports of private names or modules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("_asdict", "_fields", "_make", "_replace"):
            continue  # public names of named tuples
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lightning", "pytorch_lightning")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"line {node.lineno}: {name}" for name in names if name.startswith("_")]
    return found


def test_the_search_finds_what_it_should():
    assert foreign_private_names("trainer._results") == ["line 1: trainer._results"]
    assert foreign_private_names("from lightning.pytorch.core import _thing") == ["line 1: _thing"]
    assert foreign_private_names("self._mine = cls._ours") == []


ALLOWED = {
    # torch's own, and documented where they are used
    "trainer/engine/gradients.py": {"torch._foreach_mul_"},
    "trainer/precision/devices.py": {"torch.cpu._is_amx_tile_supported", "torch.cpu._is_avx512_bf16_supported"},
    "trainer/precision/scaler.py": {
        "torch._amp_update_scale_",
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "super()._unscale_grads_",
    },
    "trainer/precision/guard.py": {"torch._amp_foreach_non_finite_check_and_unscale_"},
    "trainer/callbacks/nonfinite_guard.py": {"torch._foreach_copy_"},
    "trainer/checkpoint/inert.py": {"pickle._Unpickler"},  # of the one in C no operation can be taken away
    "trainer/checkpoint/snapshot.py": {"storage._cdata"},  # what storages are known by, in torch's own deepcopy
    "trainer/engine/processes.py": {"os._exit"},  # of a process that hangs while it exits
    "trainer/cli/tune/child.py": {"os._exit"},  # of a process that has answered, or whose answer nobody wants
    # what a process hands on to those that it starts
    "trainer/pytorch_lightning.py": {"multiprocessing.current_process()._config"},
    "trainer/state/metric_objects.py": {"metric._computed", "metric._update_count"},
    # of torch's DataLoader, which has no public name for the workers of a pass and for the batches on their way
    "trainer/data/position.py": {
        "DataLoader._get_iterator",
        "type(loader)._get_iterator",
        "iterator._task_info",
        "loader._iterator",
        "self.loader._iterator",
        "super()._begin",
        "super()._here",
        "super()._next_data",
        "super()._reset",
    },
    "trainer/data/workers.py": {
        "iterator._timeout",
        "iterator._worker_pids_set",
        "iterator._workers",
        "signal_handling._remove_worker_pids",
        "type(iterator)._try_get_data",
        "type(loader)._get_iterator",
    },
    "trainer/state/metrics.py": {"metric._forward_cache"},  # torchmetrics keeps a step's value nowhere else
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_others_stay_in_compat(path: Path):
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("trainer/compat/") or name == "trainer/precision/cpu_fp16.py":
        return
    found = foreign_private_names(path.read_text())
    allowed = ALLOWED.get(name, set())
    assert [line for line in found if line.split(": ", 1)[1] not in allowed] == []


def test_no_lock_file_names_an_address():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins
    assert all("==" in pin and "/" not in pin and "@" not in pin for pin in pins)
