"""Checkpoints: what one holds, and how it is made and restored. The format is Lightning's."""
