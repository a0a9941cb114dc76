"""What executes programs on real tensors: a handler per opcode, a loop per worker, threads or processes."""
