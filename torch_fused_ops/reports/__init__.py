"""Report a model's fusion as objects, text, JSON and HTML."""
