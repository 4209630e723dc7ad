"""The source of batches: dataloaders, their position, their worker processes."""
