"""What a Program costs: bytes, messages, memory, microseconds."""
