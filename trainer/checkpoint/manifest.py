"""What a checkpoint says of itself. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""Version of the manifest."""

OUR_KEY = "amp_trainer"
"""Where ``loops`` of a checkpoint has what is not Lightning's."""

PART = ".ckpt-part"
"""The end of the names of what is being written. They begin with a dot."""


def facts_of(checkpoint: Any) -> dict[str, Any]:
    """What the manifest says of a checkpoint, beside its size and hash."""
    if not isinstance(checkpoint, dict):
        return {}
    numbers = {"epoch": checkpoint.get("epoch"), "step": checkpoint.get("global_step")}
    facts: dict[str, Any] = {name: number for name, number in numbers.items() if isinstance(number, int)}
    return {**facts, "weights_only": "optimizer_states" not in checkpoint}


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        saved_at: seconds since 1970.
        size: bytes: of a file's archive, without the manifest; of all files in a folder.
        sha256: of a file's archive as it was before it had a comment, and of the manifest's text up to this number; in
            a folder of the text alone, which has the sums of the files.
        facts: what else the writer has said, such as the epoch.
        files: of a folder: by name, the bytes of each file, and its SHA-256.
    """

    saved_at: float
    size: int
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def resumable(self) -> bool:
        """Whether a training can go on from the checkpoint: it holds more than weights."""
        return not self.facts.get("weights_only", False)
