"""Checks of single config fields; messages name the flags."""

from typing import Literal, get_args, get_origin

from mcore_base.options import flag, types_of


def check_field(config: object, name: str, holds: bool, wanted: str) -> None:
    """Raise ``ValueError`` with the flag, its value and ``wanted`` unless ``holds``."""
    if not holds:
        raise ValueError(f"{flag(name)} {getattr(config, name)} must be {wanted}.")


def check_at_least(config: object, least: float, *names: str) -> None:
    """Raise ``ValueError`` if a field is below a bound."""
    for name in names:
        check_field(config, name, not getattr(config, name) < least, f"{least} or more")


def check_above_zero(config: object, *names: str) -> None:
    """Raise ``ValueError`` if a field is 0 or less."""
    for name in names:
        check_field(config, name, not getattr(config, name) <= 0, "above 0")


def check_choices(config: object) -> None:
    """Raise ``ValueError`` if a field of a ``Literal`` type has none of the listed values."""
    for name, kind in types_of(type(config)).items():
        choices = get_args(kind)
        if get_origin(kind) is Literal and getattr(config, name) not in choices:
            *others, last = [choice for choice in choices if choice]
            listed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(
                f"{flag(name)} {getattr(config, name)!r} is no choice: use {listed}."
            )
