"""The events of a trace: publishing and reading them."""
