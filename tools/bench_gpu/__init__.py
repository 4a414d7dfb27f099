"""Speed of the ops on the GPU at hand: `nox -s bench -- gpu`, or `python -m bench_gpu` in tools/.

One module per family of ops, with `rows(machine, *, quick)`: it times each op at the shapes that
models have, with `gpu_timing.node_seconds`, and says what the floor of each is: bytes that must
move over `machine.copy_bytes_per_s`, or operations over `machine.matmul_flop_per_s`. `quick` asks
for the promised shapes alone. `__main__.FAMILIES` names the modules.
"""
