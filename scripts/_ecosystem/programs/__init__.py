"""One file per library: a small program that is typical of its users, with one or more cases.

A program has a docstring, ``REQUIRES`` (the library, torch and lightning, with versions), and
functions ``case_NAME(run)``, with a docstring that describes the case in its first line. ``run`` is a
:class:`_ecosystem.child.Run`: it has the Trainer (``run.Trainer(...)``; a library that builds its own gets the same
class) and a folder, and records values to compare. Weights, metrics, hooks, files and checkpoints of every run of a
Trainer are recorded automatically.

Set ``PYTORCH_LIGHTNING = True`` if the library imports ``pytorch_lightning``; ``PYTHON = "3.12"`` if it needs another
interpreter, and ``VARIES`` to regular expressions of places that differ between any two runs, such as times and names.
Importing the program must not train; the Trainer is installed before the import.
"""
