"""The fault suite: real processes, real signals, and a bitwise comparison with an undisturbed run.

``training``   the training run: a set-up with every kind of state that could be lost
``program``    the program that a case starts, kills, and starts again; under our Trainer or Lightning's
``server``     forks each run from a process that has imported torch and Lightning, so that a start is fast
``bench``      starting and stopping runs, damaging files, comparing
``cases``      the cases
``scoreboard`` the tables
"""
