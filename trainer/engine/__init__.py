"""Devices, processes and gradients: the protocol that the loops use."""
