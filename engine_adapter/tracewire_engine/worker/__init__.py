"""A worker's process: it runs the model, blocks and declared interventions."""
