"""The checker: from the tree of a `.moe` file to checked values."""
