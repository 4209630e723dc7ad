"""Run a Lightning program, unchanged, and find out why its training breaks.

Runs PROGRAM as `python PROGRAM ARGUMENTS` does, with the Trainer of this package instead of Lightning's, also in a
subclass, in LightningCLI, under the name pytorch_lightning, and in the processes that a launcher starts. The program
ends at the first verdict, which is printed with the cause, its place and one remedy. Without a verdict, the output is
that of the program, and one line at the end.

If the remedy changes a line of your program, it is tried on the failing batch and on the steps after it, and written as
a diff to doctor.patch in the working directory. `git apply doctor.patch` or `patch -p1 -i doctor.patch` applies it. In
all cases, doctor.json contains the verdict, with the keys of the diagnosis_step_N.json of other runs.

Options, before PROGRAM:
  --accelerator NAME   replace the accelerator in the program. With cpu, a program for GPUs runs on one CPU, in its own
                       precision: 16-mixed computes in float16
  --devices N          replace the number of devices in the program
  --max-steps N        end each fit after N optimizer steps
  --max-time TIME      end each fit after TIME: seconds, MM:SS, HH:MM:SS or DD:HH:MM:SS
  --continue           print the verdict, and let the program continue
  --apply              apply the patch to the program's files. Without PROGRAM: apply the patch of the last verdict in
                       this folder. Refused if one of the files has changed since

Exit status:
  0  no problem was found
  1  the program failed, without a verdict
  2  the command line is wrong, or the program uses something that this Trainer refuses
  3  a verdict with a patch
  4  a verdict without a patch: doctor.json contains the remedy
"""

from trainer.cli.commands import Command

FILE = "doctor.json"
"""The file with the last verdict, in the working directory."""

PATCH_FILE = "doctor.patch"
"""The file with its patch, if there is one."""

NOTHING_FOUND, FAILED, USAGE, PATCH, NO_PATCH = range(5)
"""The exit statuses."""

COMMAND = Command(
    __doc__,
    group="Inspect",
    usage="[OPTIONS] PROGRAM.py [ARGUMENTS ...] | [OPTIONS] -m MODULE [ARGUMENTS ...] | --apply",
    examples="""\
    python -m trainer {command} train.py --epochs 3
    python -m trainer {command} --accelerator cpu --max-steps 500 -m package.train fit --config x.yaml""",
    function="trainer.cli.doctor:command",
    takes_program=True,
)
