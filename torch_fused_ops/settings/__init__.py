"""Settings that need no torch: environment variables, and how tokens are cut into tiles."""
