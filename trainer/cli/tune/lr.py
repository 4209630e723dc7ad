"""``trainer tune lr``: a learning-rate range test, its picture, and what it suggests."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.cli import tune
from trainer.cli.arguments import Arguments
from trainer.cli.folders import from_here
from trainer.cli.tune import LOG, Settings
from trainer.cli.tune.child import Message, run_in_child
from trainer.cli.tune.lr_picture import draw
from trainer.cli.tune.lr_suggestion import suggest

PICTURE = "lr.png"


def run(arguments: Arguments) -> int:
    """``trainer tune lr``.

    Returns:
        0, or 1 when the curve suggests nothing.

    Raises:
        UsageError: as `trainer.cli.tune.command`.
        TuneError: the test failed.
    """
    config, settings = tune.composed(arguments)
    folder = tune.claim_folder(arguments, config)
    tune.say(
        f"{settings.steps} weight updates, with learning rates from {settings.min_lr:g} to {settings.max_lr:g}, in a"
        " process of their own ..."
    )
    message = run_in_child(
        "trainer.cli.tune.attempt:run_range_test",
        folder / LOG,
        settings=tune.plain(config, folder),
        min_lr=settings.min_lr,
        max_lr=settings.max_lr,
        steps=settings.steps,
    )
    if message["status"] != "ok":
        raise tune.failure(message, "The range test failed", folder)
    return report(message, config, settings, folder)


def report(message: Message, config: DictConfig, settings: Settings, folder: Path) -> int:
    """Say what a curve suggests; write ``tune.json`` and the picture.

    Args:
        message: of `trainer.cli.tune.attempt.run_range_test`.
        config: with Hydra's node.
        settings: of the test.
        folder: of the run.
    """
    points = [(float(rate), float(loss)) for rate, loss in message["points"]]
    found = suggest(points)
    current = OmegaConf.select(config, settings.lr_key)
    current = float(current) if isinstance(current, (int, float)) else None
    result: dict[str, Any] = {
        "tuned": "lr",
        "key": settings.lr_key,
        "precision": message["precision"],
        "seed": config.seed,
        "suggestion": found.lr,
        "rule": found.why,
        "lowest_loss_at": found.lowest,
        "settings": asdict(settings),
        "curve": {"lr": [rate for rate, _ in points], "loss": [loss for _, loss in points], "smoothed": found.smoothed},
        **{name: message[name] for name in ("ended_by", "skipped", "groups", "first_loss")},
    }
    tune.write(folder, result)
    if points:
        name = OmegaConf.select(config, "hydra.runtime.choices.recipe") or "Learning rates"
        figure = draw(
            points,
            found.smoothed,
            suggestion=found.lr,
            current=current,
            ended_by=message["ended_by"],
            title=f"{name}, {message['precision']}",
        )
        figure.savefig(folder / PICTURE)
    *remarks, last = _lines(message, found.lr, found.why, found.lowest, current, settings)
    for remark in remarks:
        tune.say(remark)
    print(last)
    written = from_here(folder / (PICTURE if points else tune.RESULT))
    tune.say(f"{'The curve' if points else 'Everything'} is in {written}")
    return 0 if found.lr is not None else 1


def _lines(
    message: Message, lr: float | None, why: str, lowest: float | None, current: float | None, settings: Settings
) -> list[str]:
    lines = []
    if message["ended_by"] == "divergence":
        last = message["points"][-1][0] if message["points"] else settings.min_lr
        lines.append(f"The loss diverged at a learning rate of {last:.2g}.")
    elif message["ended_by"] == "overflows":
        lines.append("In the end every update overflowed and was skipped.")
    if message["skipped"]:
        lines.append(f"{message['skipped']} updates overflowed and were skipped; they are no points of the curve.")
    if message["groups"] > 1:
        lines.append(
            f"There are {message['groups']} parameter groups, which kept their proportions: the rate is that of the"
            " fastest."
        )
    own = message["own_rates"]
    if current is not None and own and not any(math.isclose(current, rate, rel_tol=1e-6) for rate in own):
        lines.append(
            f"{settings.lr_key} is {current:g}, but the optimizer was given {own[-1]:g}: the module takes its learning"
            " rate from elsewhere. Name the setting it comes from, such as tune.lr_key=model.lr."
        )
    if lr is None:
        return [*lines, f"No suggestion: {why}."]
    lines.append(f"The loss was lowest at {lowest:.2g}; the largest rates that work lie below that.")
    now = f" (it is {current:.2g})" if current is not None else ""
    return [*lines, f"Suggestion, {why}: {settings.lr_key}={lr:.2g}{now}"]
