"""mcore-infer alone: its front, its commands' help and greedy sampling."""

from mcore_infer import __version__

assert __version__[0].isdigit(), __version__
