"""The loops of a run, the ways through a batch, and what they are made of. Start with ``trainer.loops.fit``."""
