"""The adapter's process: it takes submissions from the bus, hosts vLLM's `AsyncLLM` and publishes events."""
