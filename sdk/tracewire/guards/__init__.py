"""Guards: consumers that watch probes of all traces of a model, and pause, steer, resume or cancel traces by rules."""
