"""How an engine's processes start and end."""
