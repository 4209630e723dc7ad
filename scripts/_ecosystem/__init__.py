"""The ecosystem suite: real libraries on Lightning, each run with Lightning's Trainer and with ours.

``environments`` installs a library into its own environment
``child``        runs one case of a program with one Trainer, in a fresh process of that environment
``recorder``     records weights, metrics and hook calls of a Trainer
``describe``     converts records into comparable plain structures
``compare``      finds differences between two records, and the migration guide's sentence for each known one
``programs``     one file per library
"""
