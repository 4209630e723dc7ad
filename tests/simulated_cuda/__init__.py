"""A simulated CUDA device (``device.py``), and the process that runs tests on it (``child.py``)."""
