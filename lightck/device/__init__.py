"""The interface that lightck needs of a device that holds tensors, and CUDA behind it."""
