from mcore_train.quickstart.writing import COPY_WORDS, originality, split_words

BOOK = ["And it came to pass, that the word was with the king's men. " * 4]


def test_words_are_small_letters_without_punctuation():
    assert split_words("The LORD's day; 12 men!") == ["the", "lord's", "day", "men"]


def test_the_share_of_known_words_is_counted_over_all_words():
    found = originality("the king's blorp word", BOOK, BOOK)
    assert found.num_words == 4
    assert found.known_share == 0.75


def test_twenty_words_in_a_row_are_a_copy_and_nineteen_are_none():
    words = split_words(BOOK[0])
    assert originality(" ".join(words[:COPY_WORDS]), BOOK, BOOK).has_copied_run
    short = [*words[: COPY_WORDS - 1], "blorp", *words[: COPY_WORDS - 1]]
    assert not originality(" ".join(short), BOOK, BOOK).has_copied_run


def test_a_run_over_the_border_of_two_chapters_is_no_copy():
    words = split_words(BOOK[0])
    halves = [" ".join(words[:10]), " ".join(words[10:20])]
    assert not originality(" ".join(words[:20]), halves, halves).has_copied_run
