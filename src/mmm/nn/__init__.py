"""Parts of models that `mmm.parallel` knows: how weights start, dropout, experts, rotary positions, attention.

Nothing here knows a mesh."""
