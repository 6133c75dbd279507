"""Drawings of a schedule: every computation is in them, where it runs."""

import re
import xml.dom.minidom

from mcore_parallel.pipeline_parallel.schedule import (
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.timeline import timeline_svg, timeline_text


def test_the_text_shows_every_computation_and_every_wait():
    found = simulate(one_f_one_b(2, 3), num_microbatches=3)
    first, last, summary = timeline_text(found).splitlines()
    assert first == "rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --"
    assert last == "rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. .."
    assert "bubble 33.3%" in summary
    assert "[2, 1]" in summary


def test_the_svg_has_a_box_for_every_computation():
    for schedule, num_chunks, num_boxes in (
        (interleaved(2, 4, 2), 2, 2 * 2 * 2 * 4),
        (zero_bubble_h1(3, 4), 1, 3 * 3 * 4),
    ):
        found = simulate(schedule, num_microbatches=4, num_chunks=num_chunks)
        svg = timeline_svg(found)
        xml.dom.minidom.parseString(svg)
        assert len(re.findall("<title>", svg)) == num_boxes


def test_nothing_can_be_drawn_too():
    found = simulate([[]], num_microbatches=0)
    assert "bubble 0.0%" in timeline_text(found)
    assert timeline_svg(found).startswith("<svg")
