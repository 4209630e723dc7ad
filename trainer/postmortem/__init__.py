"""Replay training batches without side effects, to find where values stop being finite, and a remedy."""
