"""The search for a plan: what it chooses from, what bounds a choice, and the best of all by the simulator."""
