"""Engines, edits, dead letters and lifecycle events."""
