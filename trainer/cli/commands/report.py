"""Make one HTML page of a run, a sweep or several runs.

The page has settings, curves, loss scale and gradients, speed, memory, overflow reports and environment of a run or a
sweep, whether it is finished, was interrupted, or is still running. It is written to report.html in the folder of the
run, or to OUT.html, and needs no network and no other file. The default RUN_DIR is the newest run or sweep below
outputs, multirun and lightning_logs. For several folders, or one that has several runs, the page compares the runs:
different settings, curves on top of each other, one table.

Examples:
    python -m trainer report
    python -m trainer report outputs/resnet50/DATE_TIME
    python -m trainer report multirun/resnet50/DATE_TIME sweep.html
    python -m trainer report outputs/resnet50/DATE_TIME multirun/resnet50/DATE_TIME/3 two.html
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use what was trained",
    usage="[RUN_DIR ...] [OUT.html]",
    function="trainer.cli.report:command",
    words=999,
    takes_files=True,
)
