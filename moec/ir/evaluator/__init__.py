"""A Program run on all ranks at once, in fp64 and without messages: what passes are held to."""
