"""torch.export of ordinary modules, and what an exported program must not leave out."""
