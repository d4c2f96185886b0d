"""Self-distillation: a model writes its own chats, and a small draft learns to guess what it says next."""
