"""Parts of ``scripts/mutation_check``: faults drawn from the source, and a plugin of pytest that runs their tests."""
