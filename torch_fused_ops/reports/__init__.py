"""Report a model's fusion, with estimated figures, as objects, text, JSON and HTML."""
