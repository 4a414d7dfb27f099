"""What the ops refuse, on every backend: the argument rules of `contracts`, a module per family.

Every wrapper calls these before it launches or writes anything.
"""
