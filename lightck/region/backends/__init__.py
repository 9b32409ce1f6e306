"""The libraries that may map a region: the native code itself, or PMDK's."""
