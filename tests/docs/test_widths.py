"""muP: activations change by the same amount at every width; its picture is the kept one."""

import json

from docs import widths


def test_activations_move_alike_at_every_width_with_mup_and_not_without():
    found = {
        (use_mup, width): widths.change(width, use_mup=use_mup)
        for use_mup in (True, False)
        for width in (widths.BASE, 8 * widths.BASE)
    }
    stream, scores = (
        {m: found[m, 8 * widths.BASE][i] / found[m, widths.BASE][i] for m in (True, False)}
        for i in (0, 1)
    )
    assert 0.8 < stream[True] < 1.25  # 1.09 where it was written
    assert stream[False] > 1.8  # 2.2
    assert scores[True] < 1.0  # 0.57: what the head began with weighs less
    assert scores[False] > 4.0  # 7.0


def test_the_widths_drawn_are_those_of_the_kept_results():
    rows = json.loads(widths.RESULTS.read_text())["rows"]
    assert widths.PICTURE.read_text() == widths.drawn(rows), (
        "run `uv run python tests/docs/widths.py`"
    )
