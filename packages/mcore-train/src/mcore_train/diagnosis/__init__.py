"""What went wrong and what will: logs of failed runs, memory snapshots, checks of hosts."""
