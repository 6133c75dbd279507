"""Checks of single fields of configuration records, in the words of their flags."""

from typing import Literal, get_args, get_origin, get_type_hints

from mcore_base.options import flag


def check_field(config: object, name: str, holds: bool, wanted: str) -> None:
    """Refuse a field's value unless what it must be holds.

    Raises:
        ValueError: with the flag, its value and what it must be.
    """
    if not holds:
        raise ValueError(f"{flag(name)} {getattr(config, name)} must be {wanted}.")


def check_at_least(config: object, least: float, *names: str) -> None:
    """Refuse fields below a bound; as ``check_field``."""
    for name in names:
        check_field(config, name, not getattr(config, name) < least, f"{least} or more")


def check_above_zero(config: object, *names: str) -> None:
    """Refuse fields that are 0 or less; as ``check_field``."""
    for name in names:
        check_field(config, name, not getattr(config, name) <= 0, "above 0")


def check_choices(config: object) -> None:
    """Refuse words that fields of ``Literal`` types do not list.

    Raises:
        ValueError: with the flag, its value and what there is to choose from.
    """
    for name, kind in get_type_hints(type(config)).items():
        choices = get_args(kind)
        if get_origin(kind) is Literal and getattr(config, name) not in choices:
            *others, last = [choice for choice in choices if choice]
            listed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(
                f"{flag(name)} {getattr(config, name)!r} is no choice: use {listed}."
            )
