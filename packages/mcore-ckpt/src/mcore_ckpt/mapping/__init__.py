"""From one set of tensor names to another: rules, row streams, views."""
