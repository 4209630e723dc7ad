"""The loops of a run and their parts. Start with ``trainer.loops.fit``."""
