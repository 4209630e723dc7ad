"""Why a run broke: replay its batches without side effects, name the cause, and try a remedy."""
