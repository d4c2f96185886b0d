"""Whose account the work of a session goes on, and whose memory makes room for whom."""
