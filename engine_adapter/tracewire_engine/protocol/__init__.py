"""The messages between an engine's processes."""
