"""Write an HTML report of a run, a sweep or several runs.

The page contains the settings, curves, loss scale and gradients, speed, memory, overflow reports and environment of a
run or a sweep, which may be interrupted or still running. It is written to report.html in the folder of the run, or to
OUT.html, and needs no network and no other file. The default RUN_DIR is the newest run or sweep in outputs, multirun
and lightning_logs. For several folders, or a folder with several runs, the page compares the runs: settings that
differ, overlaid curves, and a table.

Examples:
    python -m trainer report
    python -m trainer report outputs/resnet50/DATE_TIME
    python -m trainer report multirun/resnet50/DATE_TIME sweep.html
    python -m trainer report outputs/resnet50/DATE_TIME multirun/resnet50/DATE_TIME/3 two.html
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use a trained model",
    usage="[RUN_DIR ...] [OUT.html]",
    function="trainer.cli.report:command",
    words=999,
    takes_files=True,
)
