"""Replacements of ``python``, ``trainer``, ``torchrun``, ``pip``, ``git`` and ``scripts/*`` while a page is run.

``python -I commands.py NAME WORDS...`` runs under each of these names. Programs run in the warm Python; training gets
limits; installations and downloads are checked without running them.
"""

import os
import re
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("python", "trainer", "torchrun", "pip", "git")
AGAIN = "python-again"
"""Programs that start other processes, in the same way as ``python``, without limits."""

_FIT = ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.max_epochs=1"]
LIMITS = {
    "fit": _FIT,
    "compare": _FIT,
    "validate": ["trainer.limit_val_batches=1"],
    "test": ["trainer.limit_test_batches=1"],
    "predict": ["trainer.limit_predict_batches=1"],
    "tune": ["tune.max_batch_size=8", "tune.steps_per_try=2", "tune.steps=10"],
}


def limits(words: list[str], given: str | None = None) -> list[str]:
    """Return settings that make a command short.

    Args:
        words: the arguments after ``python -m trainer``.
        given: settings of the author, or "none".
    """
    if given is not None:
        return [] if given == "none" else given.split()
    command = next((word for word in words if word in LIMITS), None)
    shows = {"--cfg", "-c", "--help", "-h", "--info", "-i"}.intersection(words)
    if command is None or shows or "+debug=fast_dev_run" in words:
        return []
    chosen = list(LIMITS[command])
    recipes = [word.partition("=")[2] for word in words if re.match(r"\+?recipe=", word)]
    if command != "tune" and any((ROOT / "conf" / "recipe" / f"{recipe}.yaml").is_file() for recipe in recipes):
        chosen.append("data.batch_size=4")
    if "resnet50" in recipes:
        small = {"model": "+model.net.width_per_group=1", "data": "data.image_size=32"}
        chosen += [limit for part, limit in small.items() if not any(word.startswith(part) for word in words)]
    swept = {word.partition("=")[0] for word in words if "," in word.partition("=")[2]}
    return [limit for limit in chosen if limit.partition("=")[0] not in swept]


def main(name: str, words: list[str]) -> int:
    """Run the command, or check it."""
    if words and words[0] == "-u":
        words = words[1:]
    if name == "pip" or words[:2] == ["-m", "pip"]:
        return _check_pip(words)
    if name == "git":
        return 0
    if name == "scripts/run":
        name, words = "python", ["-m", "trainer", *words]
    if name.startswith("scripts/"):
        return 0  # its presence on the path is reported
    if name == "trainer":
        name, words = "python", ["-m", "trainer", *words]
    if name == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    is_module = words[:1] == ["-m"] and words[1].startswith(("trainer", "torch.distributed.run"))
    if not words or (words[0].startswith("-") and not is_module):
        os.execv(sys.executable, [sys.executable, *words])
    if name != AGAIN:
        ours = [place for place, pair in enumerate(pairwise(words)) if pair == ("-m", "trainer")]
        if ours:
            words = [*words, *limits(words[ours[0] + 2 :], os.environ.get("DOCS_LIMITS"))]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from warm_client import run

    return run(os.environ["WARM_PYTHON"], words)


def _check_pip(words: list[str]) -> int:
    """Check that the requested extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        extra.strip() for word in words for found in re.findall(r"\[([^\]]*)\]", word) for extra in found.split(",")
    }
    missing = asked - extras.keys()
    if missing:
        print(f"There is no extra {', '.join(sorted(missing))}; there are {', '.join(extras)}.", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
