"""What a run leaves behind for the table of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT = "result.json"
"""The file a run leaves in its folder; a sweep's table is made of these."""


def read_result(folder: Path) -> dict[str, Any]:
    """What ``result.json`` in ``folder`` says; {} where there is none, or half of one."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
