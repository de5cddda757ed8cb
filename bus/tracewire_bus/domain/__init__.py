"""Rules that need no Redis: folding deltas, checking interventions, sharing work among engines."""
