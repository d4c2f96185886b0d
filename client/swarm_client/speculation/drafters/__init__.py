"""Who guesses the next tokens. `base` is the contract; importing it loads no torch."""
