"""The contracts' ops as calls of AITER's functions, one module per family.

Unit: one call. Everything that AITER's checks would abort the process for is refused before, with
the op, the argument, its value and the limit. Tensors that AITER is on record to take in one form
only are brought into it.
"""
