"""Audits: short digests of the rows that cross an edge, and how far two machines' rows may differ."""
