"""Planning: chooses cuts and slots, predicts time and memory, proves plans. Pure Python, no torch."""
