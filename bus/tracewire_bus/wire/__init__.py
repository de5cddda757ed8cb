"""What is on the wire: messages, values and their encoding."""
