"""A reinforcement learning run small enough for two CPU cores, judged by numbers.

The trainer shares no code with the engine's model. Import the modules by name: `transformers` is
loaded by `rl.trainer` alone.
"""
