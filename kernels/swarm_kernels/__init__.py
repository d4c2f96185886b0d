"""Tensors only: torch in, torch out. Knows no peers."""
