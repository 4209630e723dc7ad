"""The training loop, its steps and their outcome. Start with ``trainer.loop.fit``."""
