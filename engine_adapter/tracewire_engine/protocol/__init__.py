"""The messages, names and addresses that an engine's processes share."""
