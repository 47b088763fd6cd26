"""Words about captured graphs that the passes and their reports share."""
