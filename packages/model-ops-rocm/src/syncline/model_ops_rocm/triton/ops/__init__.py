"""Each op's wrapper: it checks what the contract says, allocates what was not given, launches.

Importing a module of this package imports Triton. Nothing here looks at a tensor's values.
"""
