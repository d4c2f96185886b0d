"""Seeds of the self-written chats, so that they cover what people ask for.

A seed is a system prompt (None: the template's own) and the first words of the user's turn, which the model then
continues.
"""

from __future__ import annotations

from typing import NamedTuple


class SeedPrompt(NamedTuple):
    system: str | None
    user: str
    weight: float


_CONCISE = "You are an assistant that rewrites text. Keep its meaning and make it more concise."
_SUMMARY = "Extract and present the main key point of the input text in one or two short sentences."
_CODE = "You are an expert programmer. Answer with code and a short explanation."

SEED_PROMPTS: tuple[SeedPrompt, ...] = (
    SeedPrompt(None, "", 12),
    SeedPrompt(None, "What is", 2),
    SeedPrompt(None, "How do I", 2),
    SeedPrompt(None, "How does", 1.5),
    SeedPrompt(None, "Why", 2),
    SeedPrompt(None, "Explain", 2),
    SeedPrompt(None, "Tell me", 1.5),
    SeedPrompt(None, "Can you", 1.5),
    SeedPrompt(None, "Give me a list of", 1.5),
    SeedPrompt(None, "Describe", 1),
    SeedPrompt(None, "Write a short story about", 1.5),
    SeedPrompt(None, "Write a poem about", 0.7),
    SeedPrompt(None, "Write an email to", 1),
    SeedPrompt(None, "I am planning", 1),
    SeedPrompt(None, "Hi", 1),
    SeedPrompt(None, "Write a Python function that", 2.5),
    SeedPrompt(None, "Write a function in JavaScript that", 1),
    SeedPrompt(None, "Write code that", 1),
    SeedPrompt(None, "Fix the bug in this Python code:\n", 1),
    SeedPrompt(_CODE, "", 1),
    SeedPrompt(None, "Summarize the following text:\n", 2),
    SeedPrompt(None, "Summarize this article in three sentences:\n", 1),
    SeedPrompt(_SUMMARY, "", 2),
    SeedPrompt(None, "Rewrite the following text in a formal tone:\n", 1.5),
    SeedPrompt(None, "Correct the grammar of this paragraph:\n", 1),
    SeedPrompt(_CONCISE, "", 2),
    SeedPrompt(None, "Extract all the names and dates from this text:\n", 1.5),
    SeedPrompt(None, "List the key facts of the following passage:\n", 1.5),
    SeedPrompt(None, "Answer the question using the passage.\nPassage:", 1.5),
    SeedPrompt(None, "Translate to French:", 0.5),
    SeedPrompt(None, "Solve this problem step by step:", 1),
)
