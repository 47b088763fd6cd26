"""Programs around the library: the command line, and ``verify``."""
