"""Ranks started, watched and ended."""
