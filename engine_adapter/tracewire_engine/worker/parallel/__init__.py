"""Blocks and declared interventions where several workers hold one model."""
