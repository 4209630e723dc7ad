"""Lightning's Trainer as modules, callbacks and loggers see it, on top of our parts."""
