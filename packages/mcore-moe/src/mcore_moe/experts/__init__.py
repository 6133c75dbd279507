"""What experts compute: grouped GEMMs, in parts, in fp8, in a narrower space; shared ones."""
