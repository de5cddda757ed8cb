"""Code that runs inside vLLM's EngineCore."""
