"""Starts the workers, as threads, forked processes or a launcher's, and tells of their ends."""
