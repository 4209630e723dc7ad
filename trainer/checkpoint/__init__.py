"""Checkpoints: their contents, and how they are written and restored. The format is Lightning's."""
