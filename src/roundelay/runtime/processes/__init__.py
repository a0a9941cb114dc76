"""What each process of a run has: children, signals of their end, messages to the one that leads, errors as text."""
