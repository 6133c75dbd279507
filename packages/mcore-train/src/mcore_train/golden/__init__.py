"""Golden runs: short trainings whose numbers are recorded and compared after every change."""
