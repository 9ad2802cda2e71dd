"""Programs that prove each hazard on this torch: exit 0 right, 1 the fault shows, 2 not here."""
