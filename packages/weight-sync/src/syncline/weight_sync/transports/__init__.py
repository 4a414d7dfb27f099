"""Ways for tensors to arrive; each yields named parts and decides nothing about them."""
