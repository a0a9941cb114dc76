"""The words of the house as data: graphs, actions, rules, plans, programs. Pure Python, no torch."""
