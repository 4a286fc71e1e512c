"""meshload: any checkpoint, any mesh, exactly its slices."""
