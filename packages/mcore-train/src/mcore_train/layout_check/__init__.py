"""``mcore-train verify``: any layout against one rank."""
