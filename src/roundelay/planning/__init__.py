"""From a job to its plan: capture, choose what is not given, measure the stages, price their memory, explain."""
