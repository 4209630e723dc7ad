"""List the recipes, print the settings of one, or copy one.

Lists the recipes of the package and of ./conf/recipe, with a description. With NAME, prints the composed config of that
recipe with the meaning of each key. `recipes copy` writes a copy to ./conf/recipe/NEWNAME.yaml for you to edit.

Examples:
    python -m trainer recipes
    python -m trainer recipes resnet50 precision=16-mixed
    python -m trainer recipes copy resnet50 mine
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Inspect",
    usage="[NAME [SETTING=VALUE ...] | copy NAME [NEWNAME]]",
    function="trainer.cli.recipes:command",
    words=3,
)
