"""Reports on the fusion of a model, as objects, text, JSON and HTML, with estimated figures."""
