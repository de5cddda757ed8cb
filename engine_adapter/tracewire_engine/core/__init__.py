"""What runs inside vLLM's EngineCore."""
