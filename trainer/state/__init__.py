"""The state of a run: counters, metrics, stopping conditions, random states."""
