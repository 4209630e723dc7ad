"""List the recipes, print the settings of one, or copy one.

Lists the recipes of the package and those in ./conf/recipe, with a line on each. With a NAME, prints that recipe,
composed, with the meaning of every key. `recipes copy` writes a copy to ./conf/recipe/NEWNAME.yaml, to be edited.

Examples:
    python -m trainer recipes
    python -m trainer recipes resnet50 precision=16-mixed
    python -m trainer recipes copy resnet50 mine
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Look around",
    usage="[NAME [SETTING=VALUE ...] | copy NAME [NEWNAME]]",
    function="trainer.cli.recipes:command",
    words=3,
)
