"""Tests here need a launcher's world: without one they are not collected."""

from mcore_parallel.launch.launcher import read_environment

collect_ignore = [] if read_environment().is_launched else ["test_world.py"]
