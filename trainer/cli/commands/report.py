"""Declare ``trainer report``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="make one HTML page of a run, a sweep or several runs",
    about="""\
Makes one page of a run or a sweep, whether it is finished, was cut short, or still goes on: settings, curves,
loss scale and gradients, speed, memory, overflow reports, environment. It is written to report.html in the
folder of the run, or to OUT.html, and needs nothing but itself: no network, no other file. Without RUN_DIR it is
about the newest run or sweep below outputs, multirun and lightning_logs. Of several folders, or of one that holds
several runs, the page shows the runs side by side: which settings differ, their curves on top of each other, one
table.

Examples:
    python -m trainer report
    python -m trainer report outputs/resnet50/DATE_TIME
    python -m trainer report multirun/resnet50/DATE_TIME sweep.html
    python -m trainer report outputs/resnet50/DATE_TIME multirun/resnet50/DATE_TIME/3 two.html""",
    group="Use what was trained",
    usage="[RUN_DIR ...] [OUT.html]",
    function="trainer.cli.report:command",
    words=999,
    takes_files=True,
)
