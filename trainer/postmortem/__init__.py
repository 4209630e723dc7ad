"""Running a training batch a second time, without a trace, to see where its numbers stop being finite."""
