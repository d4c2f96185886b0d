"""Anthropic's Messages API: its JSON to a `ChatRequest`, and the events of the answer to its JSON and stream."""
