"""Bulk stores: large saves of traces are in files of the engine's host, and events refer to them."""
