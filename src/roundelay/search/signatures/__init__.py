"""The search over signatures of every operation on a mesh of several axes, exact in a space that is told (numpy)."""
