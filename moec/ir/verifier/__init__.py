"""What every Program must keep after every pass."""
