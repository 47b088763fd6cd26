"""Tools for tests: sample inputs, the precision contract and the opcheck runner."""
