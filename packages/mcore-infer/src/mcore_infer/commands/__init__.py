"""The commands of ``mcore-infer``, one a file; help answers without torch."""
