"""Answers that are outlined first, and whose points are written side by side (Jupiter §V-B; docs/guide/outline.md)."""
