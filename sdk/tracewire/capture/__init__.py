"""How a block leaves the caller's process: its source, and the values of its names."""
