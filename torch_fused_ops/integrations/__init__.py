"""Callbacks for trainers (``docs/integrations.md``). A file imports its trainer, and no other file imports it."""
