"""Layer-wise update: each layer is updated, and its copy begins, as its gradient is final."""
