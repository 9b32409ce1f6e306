"""Live tensors into a region: planned, queued, copied in the background, sealed and committed."""
