"""A trace of every thread, and its form for Perfetto."""
