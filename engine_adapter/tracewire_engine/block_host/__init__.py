"""The process that runs the blocks of one trace, away from the model."""
