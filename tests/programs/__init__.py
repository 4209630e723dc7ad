"""Complete programs, as people write them for Lightning: each trains with ``lightning.Trainer``.

``tests/test_programs.py`` runs each as it is, and again with nothing changed but the import of the Trainer.
"""
