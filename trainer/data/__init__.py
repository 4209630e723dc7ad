"""Where batches come from: dataloaders, their position, their worker processes."""
