"""Skeleton decoding: an outline first, then its points generated in parallel (Jupiter §V-B; docs/guide/outline.md)."""
