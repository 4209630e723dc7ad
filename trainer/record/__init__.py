"""What a run writes about itself: ``run.json``, and who reads it.

`recorder` collects while a fit goes on; `run_file` is the file; `reader` is the one place that reads it, with
``metrics.csv`` beside it, for the printed summary, the pictures, the report, sweeps and comparisons.
"""
