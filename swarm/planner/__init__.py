"""Planning, pure and deterministic: no I/O, clock, randomness, asyncio or torch."""
