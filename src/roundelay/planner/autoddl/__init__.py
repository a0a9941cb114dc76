"""AutoDDL as the paper has it, to compare with: its space of triples, its costs, its searches and its baselines.

`collectives` prices collectives on machines of one or two levels, `space` has the triples of a linear layer and
chains of these, `models` the chains that the paper tries, `boxing` what lies between two layers, `prices` all costs of
a chain, `searches` the four searches, `baselines` what the paper compares with.
"""
