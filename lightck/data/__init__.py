"""The position in the data: samplers and loaders, and what they draw ahead of the loop."""
