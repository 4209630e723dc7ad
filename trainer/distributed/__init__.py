"""Devices and processes: the engine that the loop uses, strategies, launchers, and sharding."""
