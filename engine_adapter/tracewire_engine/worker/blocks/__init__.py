"""Blocks: code that a submission brought, run between the model's modules."""
