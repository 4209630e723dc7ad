"""Programs that train badly, each with the verdict that fits it, and programs that only look as if they did."""
