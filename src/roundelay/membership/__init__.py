"""Who belongs to a run, and since when: values and functions over them, without input and output. No torch."""
