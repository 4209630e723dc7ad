"""A CUDA device that is not there: ``device.py`` says what it is, ``child.py`` where tests run on it."""
