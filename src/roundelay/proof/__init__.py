"""The proof: the captured job against plain PyTorch, and a run against the one-process reference, bit for bit."""
