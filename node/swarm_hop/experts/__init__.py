"""Layers that are too big for a node: the leader's questions to those that hold its experts, and their answers."""
