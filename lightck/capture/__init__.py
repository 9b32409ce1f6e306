"""From live tensors to a region: what there is, when it holds still, the way through the pool."""
