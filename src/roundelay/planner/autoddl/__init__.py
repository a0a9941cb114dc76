"""The search of Chen and others (2023) as published, to compare with: its space, costs, searches and baselines.

`collectives` prices collectives on machines of one or two levels, `space` has the triples of a linear layer and
chains of these, `models` the chains that the paper tries, `boxing` what lies between two layers, `prices` all costs of
a chain, `searches` the four searches, `baselines` what the paper compares with.
"""
