"""`moec import`: a `.moe` file from a model folder."""
