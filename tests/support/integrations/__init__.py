"""Tests of the integrations share a script's probe, its server, and the chain of its lives."""
