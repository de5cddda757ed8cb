"""Static renderings of traces and saved values, as notebooks keep them: HTML without scripts, and text."""
