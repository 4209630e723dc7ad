"""``trainer tune lr``: run a learning rate range test, and suggest a rate. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.cli import tune
from trainer.cli.parsing import Arguments
from trainer.cli.tune import LOG, Settings
from trainer.cli.tune.child import Message, run_in_child
from trainer.cli.workdir import claim

_CLEAR = 5  # standard errors; a smaller decrease may be chance, because many means are compared
_MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a standard normal variable


def run(arguments: Arguments) -> int:
    """Run ``trainer tune lr``.

    Returns:
        0, or 1 if the curve suggests no rate.

    Raises:
        UsageError: as in `trainer.cli.tune.command`.
        TuneError: if the test failed.
    """
    config, settings = tune.composed(arguments)
    folder = claim(arguments, config).resolve()
    rates = {name: getattr(settings, name) for name in ("min_lr", "max_lr", "steps")}
    function = "trainer.cli.tune.attempt:train"
    message = run_in_child(function, folder / LOG, settings=tune.plain(config, folder), rates=rates)
    if message["status"] != "ok":
        raise tune.failure(message, "The range test failed", folder)
    return report(message, config, settings, folder)


def report(message: Message, config: DictConfig, settings: Settings, folder: Path) -> int:
    """Print the suggestion of a curve, and write ``tune.json``.

    Args:
        message: message of `trainer.cli.tune.attempt.train`.
        config: the config with the node ``hydra``.
        settings: settings of the test.
        folder: folder of the run.
    """
    points = [(float(rate), float(loss)) for rate, loss in message["points"]]
    rate, reason = suggest(points)
    result: dict[str, Any] = {
        "tuned": "lr",
        "key": settings.lr_key,
        "precision": message["precision"],
        "seed": config.seed,
        "suggestion": rate,
        "reason": reason,
        "curve": {"lr": [rate for rate, _ in points], "loss": [loss for _, loss in points]},
        **{name: message[name] for name in ("ended_by", "skipped", "first_loss")},
    }
    tune.print_unless_quiet(
        f"The test ended with {message['ended_by']}, after {len(points)} rates and {message['skipped']} skipped steps."
    )
    if rate is None:
        print(f"No suggestion: {reason}.")
    else:
        current = OmegaConf.select(config, settings.lr_key)
        current_text = f" (currently {current:.2g})" if isinstance(current, (int, float)) else ""
        print(f"Suggestion, {reason}: {settings.lr_key}={rate:.2g}{current_text}")
    tune.write(folder, result)
    return 0 if rate is not None else 1


def suggest(points: Sequence[tuple[float, float]]) -> tuple[float | None, str]:
    """Return the learning rate with the steepest decrease of the loss over the logarithm of the rate, and the reason.

    The slope at a point is that of a least-squares line through the point and its neighbors, an eighth of the curve in
    total. Points after the lowest loss are ignored. fastai's ``lr_find`` calls this rule "steep". The rate at the
    lowest loss itself is too large, because training is about to diverge there.

    Args:
        points: pairs of a rate and a loss, with a constant factor between consecutive rates.

    Returns:
        The rate and the rule; or None and the reason why there is no suggestion.
    """
    losses, logs = [loss for _, loss in points], [math.log(rate) for rate, _ in points]
    reach = max(2, len(points) // 16)
    smoothed = [statistics.fmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]
    if len(points) < 4 * reach:
        return None, f"the curve has only {len(points)} points: use more tune.steps, or a smaller tune.min_lr"
    inner = range(reach, len(points) - reach)  # points with means over the same number of points
    lowest = min(inner, key=smoothed.__getitem__)
    # The spread of the loss from one point to the next, as a standard deviation, before the loss diverges.
    calm = losses[: max(lowest + 1, len(losses) // 2)]
    spread = statistics.median(abs(b - a) for a, b in pairwise(calm)) / (math.sqrt(2) * _MEDIAN_OF_NORMAL)
    if smoothed[reach] - smoothed[lowest] <= _CLEAR * spread / math.sqrt(2 * reach + 1):
        return None, (
            "the loss does not decrease clearly: use another tune.min_lr and tune.max_lr, larger batches, or more"
            " tune.steps"
        )

    def slope(i: int) -> float:
        window = slice(i - reach, i + reach + 1)
        return statistics.linear_regression(logs[window], losses[window]).slope

    steepest = min(range(reach, lowest + 1), key=slope)
    return points[steepest][0], "at the steepest decrease of the loss"
