"""Reports on what the fusion pass does to a model, as objects, text, JSON and a page, with estimated figures."""
