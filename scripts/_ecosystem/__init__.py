"""The ecosystem suite: real libraries on Lightning, each run with Lightning's Trainer and with ours.

``environments`` installs a library into an environment of its own
``child``        runs one case of a program with one Trainer, in a fresh process of that environment
``recorder``     writes down what the Trainer did: weights, metrics, hooks
``describe``     turns what was kept into plain structures that compare
``compare``      finds differences between two records; those that the guide names are known by their row
``programs``     one file a library
"""
