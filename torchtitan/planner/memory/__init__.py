"""Memory of a rank: by formula from the sizes of tensors, and as counted in a rehearsed step."""
