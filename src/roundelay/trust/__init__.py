"""Who may take part in a run: its authority, and the certificates that it issues. No torch."""
