"""Stages, schedules as data, the simulator that checks them and the runner."""
