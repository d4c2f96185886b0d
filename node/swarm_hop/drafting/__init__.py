"""Drafts of the tail: the text as its steps tell it, and the drafter that reads the states of it."""
