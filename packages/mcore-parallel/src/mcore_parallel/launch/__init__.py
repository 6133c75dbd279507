"""Starting ranks, joining them, and ending them when one is gone."""
