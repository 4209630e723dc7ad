"""The fault suite: real processes, real signals, and a comparison to the bit with the run that nothing happened to.

``training``   what is trained: a set-up with everything in it whose state could be lost
``program``    the program that a case starts, kills, and starts again; under our Trainer or Lightning's
``server``     forks each run from a process that has imported torch and Lightning, so that a start costs nothing
``bench``      starting and stopping runs, damaging files, comparing
``cases``      the cases
``scoreboard`` the tables
"""
