"""Tools and thinking: what a model writes split into text, reasoning and calls; prompts and grammars for calls."""
