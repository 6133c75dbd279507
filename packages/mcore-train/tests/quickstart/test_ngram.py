import itertools
import math

import pytest

from mcore_train.quickstart.ngram import BASE, BORDER, ByteNGram


def slow_prob(documents, context, symbol, order):
    """Interpolated Witten-Bell from the paper's formula, with dictionaries."""
    if order == 0:
        return 1 / BASE
    history = context[len(context) - (order - 1) :] if order > 1 else ()
    followers = {}
    for document in documents:
        text = (BORDER,) * 9 + tuple(document) + (BORDER,)
        for place in range(9, len(text)):
            if text[place - order + 1 : place] == history:
                followers[text[place]] = followers.get(text[place], 0) + 1
    lower = slow_prob(documents, context, symbol, order - 1)
    if not followers:
        return lower
    count, kinds = sum(followers.values()), len(followers)
    return (followers.get(symbol, 0) + kinds * lower) / (count + kinds)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_bits_equal_the_formula_worked_out_slowly(order):
    train, held = [b"abracadabra", b"abba", b"cab"], [b"abraba", b"x", b"bac"]
    bits = 0.0
    for document in held:
        text = (BORDER,) * 9 + tuple(document) + (BORDER,)
        for place in range(9, len(text)):
            prob = slow_prob(train, text[place - 8 : place], text[place], order)
            bits -= math.log2(prob)
    assert ByteNGram(train, order).bits(held) == pytest.approx(bits, rel=1e-12)


def test_probabilities_of_all_single_byte_documents_sum_to_less_than_one():
    model = ByteNGram([b"aab", b"abc"], 3)
    total = sum(2 ** -model.bits([bytes([byte])]) for byte in range(256))
    assert 0 < total < 1


def test_a_longer_context_predicts_a_repetitive_text_better():
    train = [b"the cat sat on the mat. " * 5]
    scores = [ByteNGram(train, order).bits_per_byte(train) for order in (1, 2, 3, 5)]
    assert all(a > b for a, b in itertools.pairwise(scores))


def test_an_order_that_does_not_fit_and_an_empty_text_are_refused():
    with pytest.raises(ValueError, match="order 9"):
        ByteNGram([b"a"], 9)
    with pytest.raises(ValueError, match="no document"):
        ByteNGram([])
