import json

import pytest

from mcore_data.preprocessing.records import parse_lines

LONG = ["x" * 9000, "\u4f60\n" * 3000, "", 'say "so"\\', "\U0001f600" * 500]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_long_lines_are_read_as_the_standard_library_reads_them(end):
    lines = [json.dumps({"text": text, "n": [text]}, ensure_ascii=False) for text in LONG]
    data = "\n".join(lines).encode() + end
    parsed = parse_lines(data, ("text", "n"))
    assert parsed.columns == [LONG, [[text] for text in LONG]]
    assert (parsed.bad, parsed.num_records) == ([], len(LONG))


def test_a_bad_line_among_long_ones_has_its_number_and_the_others_stay():
    lines = [json.dumps({"text": text}) for text in LONG]
    data = "\n".join([*lines[:2], "", *lines[2:], '{"text": "cut']).encode()
    parsed = parse_lines(data, ("text",))
    assert parsed.columns == [LONG]
    assert [bad.number for bad in parsed.bad] == [3, 7]
    assert parsed.num_records == 7
