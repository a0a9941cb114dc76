"""Reads batches, ahead of the stages that compute, and says which of them a run has."""
