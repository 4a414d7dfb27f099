"""Runs that show whether the engine's memory is right, from the outside."""
