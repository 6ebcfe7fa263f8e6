"""The expert cache of a run: slots, tiers, copies and the expert file."""
