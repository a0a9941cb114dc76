"""Who may take part in a run: its authority, the certificates that it issues, and its invitations. No torch."""
