"""Declare ``trainer recipes``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="list the recipes, show what one says, or copy one to edit",
    about="""\
Lists the recipes that come with the package and those in ./conf/recipe, with a line on each. With a NAME: that
recipe, composed, with the meaning of every key. `recipes copy` writes one to ./conf/recipe/NEWNAME.yaml, to be edited.

Examples:
    python -m trainer recipes
    python -m trainer recipes resnet50 precision=16-mixed
    python -m trainer recipes copy resnet50 mine""",
    group="Look around",
    usage="[NAME [SETTING=VALUE ...] | copy NAME [NEWNAME]]",
    function="trainer.cli.recipes:command",
    words=3,
)
