"""What is decided from costs, and plan.json, which says so."""
