"""Model folders as Hugging Face lays them out."""
