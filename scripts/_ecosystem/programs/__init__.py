"""One file a library: a small real program of its kind, with one or more cases.

A program has a docstring, ``REQUIRES`` (what is installed: the library, torch and lightning, with versions), and
functions ``case_NAME(run)``, whose first line of docstring says what happens. ``run`` is a
:class:`_ecosystem.child.Run`: it has the Trainer (``run.Trainer(...)``; a library that builds one gets the same) and a
folder, and takes what is to be compared. Weights, metrics, hooks, files and checkpoints of every run of a Trainer are
kept without being asked.

``PYTORCH_LIGHTNING = True`` where the library imports ``pytorch_lightning``; ``PYTHON = "3.12"`` where it needs
another interpreter; ``VARIES``: regular expressions of what differs between any two runs, such as times and names.
Importing the program must not train anything; the Trainer is in place before it is imported.
"""
