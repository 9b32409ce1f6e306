"""Modules that tests of several folders import."""
