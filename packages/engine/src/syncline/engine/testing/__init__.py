"""Helpers that tests of several rooms share; nothing here is needed to serve."""
