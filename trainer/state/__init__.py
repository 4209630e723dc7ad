"""What a run knows of itself: counters, metrics, stopping conditions, random states."""
