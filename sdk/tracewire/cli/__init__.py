"""The command line, `tracewire`."""
