"""Operations on a mesh: their forms, and the graph that each worker of an axis runs."""
