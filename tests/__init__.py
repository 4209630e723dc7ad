import os

# before torch is imported: threads of parallel tests that wait for each other multiply the time of the tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
