"""PMDK's libraries beside the native code, and the choice of what maps a region."""
