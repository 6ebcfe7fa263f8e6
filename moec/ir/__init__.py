"""The Program and its text: what passes change, and what prints and parses."""
