"""Self-distillation: a model writes its own chats, and a small drafter learns to predict its next tokens."""
