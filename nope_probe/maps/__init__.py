"""Maps: what a map is, how its folds are kept and stored, how it is pooled and centred."""
