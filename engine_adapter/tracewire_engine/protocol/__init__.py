"""What an engine's processes say to each other."""
