"""What the fuzzer calls, one module a target.

Each has `run(data)`, which raises nothing but what a bug raises: every error that hostile bytes may cause is caught in
it, by its type. `INSTRUMENT`: prefixes of the modules whose branches guide the fuzzer. `seeds()`: valid inputs, from
which `tests/fuzz/fuzz.py --seed` fills an empty corpus.
"""
