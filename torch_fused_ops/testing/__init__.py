"""Tools for tests: sample inputs, the opcheck runner and the virtual GPU."""
