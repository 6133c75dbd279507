"""From a config to a model: checks of a layout, construction, initial weights."""
