"""Model tables: one per naming, data only."""
