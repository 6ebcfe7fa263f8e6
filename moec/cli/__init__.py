"""The `moec` command."""
