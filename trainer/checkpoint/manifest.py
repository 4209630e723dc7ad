"""The manifest of a checkpoint. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 2
"""Version of the manifest."""

TRAINER_KEY = "amp_trainer"
"""The key of our own entries, below ``loops`` in a checkpoint."""

PART = ".ckpt-part"
"""Suffix of unfinished files. Their names also begin with a dot."""


def facts_of(checkpoint: Any) -> dict[str, Any]:
    """Return the facts about a checkpoint for its manifest, in addition to size and hash."""
    if not isinstance(checkpoint, dict):
        return {}
    numbers = {"epoch": checkpoint.get("epoch"), "step": checkpoint.get("global_step")}
    facts: dict[str, Any] = {name: number for name, number in numbers.items() if isinstance(number, int)}
    return {**facts, "weights_only": "optimizer_states" not in checkpoint}


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint: of a file, a zip archive with the manifest as its comment, or of a folder.

    Args:
        saved_at: seconds since 1970.
        size: size in bytes. Of a file: without the manifest. Of a folder: of all its files.
        sha256: of a file: one hash of the archive without the manifest and the contents of its members, followed by the
            manifest's text up to the hash. Of a folder: the hash of the manifest's text up to the hash. This text
            contains the hash of each file.
        facts: additional values, such as the epoch.
        files: of a folder: size in bytes and SHA-256 of each file, by name.
    """

    saved_at: float
    size: int
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def resumable(self) -> bool:
        """Whether training can be resumed from the checkpoint: it contains more than weights."""
        return not self.facts.get("weights_only", False)
