"""GEMMs of linears: one object for each precision."""
