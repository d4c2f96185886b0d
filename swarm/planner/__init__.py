"""Decisions, pure and deterministic: no sockets, clocks, randomness of their own, asyncio or torch."""
