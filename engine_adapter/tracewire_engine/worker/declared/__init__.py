"""Declared interventions: a few batched kernels a step for all requests."""
