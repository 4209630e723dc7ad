"""The record of a run, ``run.json``: `run_record.RunRecord` writes and reads it, `sweep.Sweep` compares several.

`trainer.callbacks.RunRecorder` collects the facts of a fit. The printed summary, the curves, the report, sweeps and
comparisons read the record.
"""
