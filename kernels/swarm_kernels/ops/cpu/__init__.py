"""The CPU kernels: C++ sources and their ctypes binding."""
