"""Runs Python's garbage collector on all ranks after the same steps.

By default the collector runs after a number of new objects, at different times on each rank. It
stops kernel launches for tens of milliseconds, and the other ranks wait in the next collective.
Here all ranks collect after the same steps, and objects that are alive at the start (modules,
imported code) are frozen, so that the collector skips them.
"""

import gc


class GCControl:
    """Context in which only ``after_step`` collects; restores Python's collector on exit."""

    def __init__(self, interval: int) -> None:
        """Store the interval.

        Args:
            interval: steps between two collections; 0 does not change the collector.
        """
        self.interval = interval
        self._was_enabled = False

    def __enter__(self) -> "GCControl":
        """Freeze all live objects and disable automatic garbage collection."""
        if self.interval:
            self._was_enabled = gc.isenabled()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, iteration: int) -> None:
        """Collect, after every ``interval``-th step."""
        if self.interval and iteration % self.interval == 0:
            gc.collect()

    def __exit__(self, *exception: object) -> None:
        if self.interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
