"""OpenAI's Responses API: its JSON to a `ChatRequest`, an answer's events to its items, and what is kept of them."""
