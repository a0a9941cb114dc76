"""How machines that do not know each other meet: the door of a run, and who knocks there. No torch."""
