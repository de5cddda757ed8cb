"""Bulk beside Redis: what traces save in volume lies in files of the engine's host, and events refer to it."""
