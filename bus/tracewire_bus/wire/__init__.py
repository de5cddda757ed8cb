"""The wire format: messages, values and their encoding."""
