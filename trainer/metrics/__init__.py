"""Logged values: reductions over steps and processes, and metric objects."""
