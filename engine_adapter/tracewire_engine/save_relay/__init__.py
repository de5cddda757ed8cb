"""The save relay: a process that passes on to the adapters what hosts of blocks have saved."""
