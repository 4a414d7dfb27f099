"""From logits to tokens: one pipeline for every path, with counter-based randomness."""
