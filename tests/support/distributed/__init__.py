"""Ranks, their trainings and their stores, for the tests of several ranks."""
