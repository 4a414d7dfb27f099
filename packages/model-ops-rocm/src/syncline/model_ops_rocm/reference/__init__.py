"""The `torch` backend: every op in plain PyTorch, the oracle of the others and the CPU's engine.

Fast on a CPU where that costs no clarity; what is fast and why is said in each module. Knows no
registry: `backend` lists the ops, `registry` reads the list.
"""
