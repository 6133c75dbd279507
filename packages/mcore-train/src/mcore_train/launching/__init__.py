"""Jobs on several hosts: rendered files, preflight, restarts, and the schedulers' programs."""
