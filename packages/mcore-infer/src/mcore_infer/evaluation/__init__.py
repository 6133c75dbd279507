"""How well a model predicts: texts, and the zero-shot tasks of the field."""
