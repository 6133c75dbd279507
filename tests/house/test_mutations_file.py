"""tests/mutations.toml misses no entry of the catalogue of silent bugs."""

from house import rows

OUTCOMES = {"test", "open", "not_ours"}


def test_every_entry_of_the_catalogue_is_there_once():
    ids = [row["id"] for row in rows.read_rows(rows.MUTATIONS)]
    assert ids == [f"N{i}" for i in range(1, 14)] + [f"F{i}" for i in range(1, 41)]


def test_every_entry_is_killed_by_a_test_or_says_why_not():
    mutations = rows.read_rows(rows.MUTATIONS)
    assert rows.faults(mutations, OUTCOMES, rows.topics()) == []


def test_the_register_rule_sees_an_entry_without_an_outcome():
    assert rows.faults([{"id": "N1", "what": "x"}], OUTCOMES, set()) != []
    assert rows.faults([{"id": "N1", "what": "x", "not_ours": "why"}], OUTCOMES, set()) == []
