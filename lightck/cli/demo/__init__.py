"""`lightck demo`: train a small model, kill it, and watch it come back."""
