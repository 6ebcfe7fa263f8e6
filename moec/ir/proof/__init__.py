"""The symbolic proof that every pair of token and expert arrives, is computed once and comes back."""
