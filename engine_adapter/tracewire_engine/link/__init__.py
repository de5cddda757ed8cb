"""How messages travel between the adapter and the workers."""
