"""Parts of ``scripts/mutation_check``: faults drawn from the source, and a pytest plugin that runs their tests."""
