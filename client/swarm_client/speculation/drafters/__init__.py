"""Drafters for speculative decoding. `base` is the contract; importing it loads no torch."""
