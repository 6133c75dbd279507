"""The scheduler against a cache that remembers who wrote what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_infer.engine.limits import SchedulerConfig
from mcore_infer.engine.prefix_pages import FIRST_KEY, PagePool, next_key
from mcore_infer.engine.scheduler import Scheduler


def next_token(tokens):
    """A model: the next token depends on all before it."""
    return hash(tuple(tokens)) % 5


class Memory:
    """The cache of that model: every place holds all tokens up to its own."""

    def __init__(self, scheduler, *, check_all=True):
        self.scheduler, self.check_all = scheduler, check_all
        self.pages = {}
        self.texts = {}

    def compute(self, step):
        """Write each chunk's tokens, read all that they see, choose the tokens wanted."""
        new, size = {}, self.scheduler.pool.page_tokens
        written = set()
        for chunk in step.chunks:
            if not self.scheduler.has(chunk.request):  # it ended before this step
                continue
            drafts = chunk.tokens[len(chunk.tokens) - chunk.num_drafts :]
            text = [*self.texts[chunk.request], *drafts]
            end = chunk.begin + len(chunk.tokens)
            assert chunk.tokens in ((-1,), tuple(text[chunk.begin : end]))
            for place in range(chunk.begin, end):
                page = chunk.pages[place // size]
                assert self.scheduler.pool.num_users(page) == 1, "a shared page is written"
                assert (page, place % size) not in written
                written.add((page, place % size))
                self.pages[page, place % size] = tuple(text[: place + 1])
        for chunk in step.chunks:
            if not self.scheduler.has(chunk.request):
                continue
            drafts = chunk.tokens[len(chunk.tokens) - chunk.num_drafts :]
            text = [*self.texts[chunk.request], *drafts]
            end = chunk.begin + len(chunk.tokens)
            window = self.scheduler.window
            first = 0 if window < 0 else max(0, chunk.begin - window)
            for place in range(first, end):
                page = chunk.pages[place // size]
                assert self.pages[page, place % size] == tuple(text[: place + 1])
            if chunk.wants_token:
                assert end == len(text)
                right = straight(self.texts[chunk.request], len(drafts) + 1)[-len(drafts) - 1 :]
                count = next((i for i, d in enumerate(drafts) if d != right[i]), len(drafts))
                new[chunk.request] = right[: count + 1]
        return new


def run(
    scheduler,
    memory,
    num_new,
    steps=10_000,
    aborts=(),
    *,
    runs_ahead=False,
    num_drafts=0,
    changes=(),
):
    """Run to the end; return the texts of the requests that were not aborted.

    Before the steps in ``changes`` the weights change: what earlier ones computed is gone.
    """
    left = dict(num_new)
    ahead, is_gone = None, False

    def drafts():
        """Right up to some place, which is none, all, or one between."""
        found = {}
        for request in scheduler.writing:
            text = memory.texts[request]
            count = min(num_drafts, left[request] - 1)
            found[request] = straight(text, count)[len(text) :]
            if wrong := len(text) % (num_drafts + 1):
                found[request][wrong - 1 : wrong] = [9]
            found[request] = found[request][: max(0, count)]
        return found

    for number in range(steps):
        for request in {r for when, r in aborts if when == number and scheduler.has(r)}:
            scheduler.finish(request)
            left.pop(request)
        if number in changes:
            scheduler.recompute()
            is_gone = True
        if is_gone and not ahead:
            memory.pages.clear()
            is_gone = False
        step = ahead or scheduler.plan(drafts() if num_drafts else {})
        if step is None:
            break
        assert step.num_tokens <= scheduler.config.max_tokens
        slots = [chunk.slot for chunk in step.chunks]
        assert len(set(slots)) == len(slots)
        assert max(slots) < scheduler.config.max_requests
        new = memory.compute(step)
        # Some clients leave while their tokens are being computed.
        for request in {r for when, r in aborts if -when == number and scheduler.has(r)}:
            scheduler.finish(request)
            left.pop(request)
        ends = any(left.get(request) == len(tokens) for request, tokens in new.items())
        ahead = scheduler.plan_ahead(step) if runs_ahead and not ends else None
        scheduler.complete(step, new)
        for request, tokens in new.items():
            if request in left:
                memory.texts[request] += tokens
                left[request] -= len(tokens)
                if not left[request]:
                    scheduler.finish(request)
    assert not scheduler.num_running, "requests stand still"
    assert not scheduler.num_waiting, "requests starve"
    assert scheduler.pool.num_free == scheduler.pool.num_pages, "pages leak"
    return {r: memory.texts[r] for r, count in left.items() if not count}


def straight(prompt, count):
    """What a model writes alone."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text


requests = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=8
)


@settings(max_examples=100, deadline=None)
@given(
    requests=requests,
    page_tokens=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 6),
    max_requests=st.integers(1, 4),
    extra=st.integers(0, 6),
    window=st.sampled_from([-1, -1, 0, 3]),
    prefix_cache=st.booleans(),
    aborts=st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 7)), max_size=3),
    runs_ahead=st.booleans(),
    num_drafts=st.sampled_from([0, 0, 1, 3]),
    changes=st.sets(st.integers(0, 15), max_size=2),
)
def test_every_text_is_what_it_would_be_alone_however_few_pages_there_are(
    requests,
    page_tokens,
    spare,
    max_requests,
    extra,
    window,
    prefix_cache,
    aborts,
    runs_ahead,
    num_drafts,
    changes,
):
    longest = max(prompt + new for prompt, new, _ in requests)
    pool = PagePool(-(-longest // page_tokens) + spare, page_tokens)
    config = SchedulerConfig(
        max_requests=max_requests,
        max_tokens=max_requests + extra,
        max_sequence_tokens=longest,
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(config, pool, window=window)
    memory = Memory(scheduler)
    # Prompts of one kind begin alike.
    prompts = [
        [kind] * (length - length // 3) + [3] * (length // 3) for length, _, kind in requests
    ]
    for i, (prompt, (_, new, _)) in enumerate(zip(prompts, requests, strict=True)):
        memory.texts[i] = list(prompt)
        scheduler.add(i, prompt, new)
    num_new = {i: new for i, (_, new, _) in enumerate(requests)}
    options = {"runs_ahead": runs_ahead, "num_drafts": num_drafts, "changes": changes}
    done = run(scheduler, memory, num_new, aborts=aborts, **options)
    for i, text in done.items():
        assert text == straight(prompts[i], requests[i][1])


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_a_prompt_sent_twice_is_shared_but_for_its_last_page_and_token(length):
    scheduler = Scheduler(SchedulerConfig(max_requests=1), PagePool(20, 4))
    prompt, computed = list(range(length)), []
    for request in (0, 1):
        scheduler.add(request, prompt, 1)
        step = scheduler.plan()
        computed.append(step.num_tokens)
        scheduler.complete(step, {request: [1]})
        scheduler.finish(request)
    assert computed == [length, length - (length - 1) // 4 * 4]


def test_texts_with_prompt_scores_share_nothing():
    scheduler = Scheduler(SchedulerConfig(), PagePool(50, 2))

    def computed(request, **options):
        scheduler.add(request, [1, 2, 3, 4, 5], 1, **options)
        step = scheduler.plan()
        scheduler.complete(step, {request: [0]})
        scheduler.finish(request)
        return step.num_tokens

    assert computed(0) == 5
    assert computed(1) == 1
    assert computed(2, shares_prefix=False) == 5


def test_keys_are_megatrons():
    key = next_key(FIRST_KEY, [1, 2])
    keys = [key, next_key(key, [3, 4])]
    numbers = [int.from_bytes(k[:8], "little") % (2**63 - 1) + 1 for k in keys]
    assert numbers == [4233502300241348285, 2039082787298172998]


def test_writing_goes_on_while_a_long_prompt_is_read():
    scheduler = Scheduler(SchedulerConfig(max_requests=4, max_tokens=8), PagePool(100, 4))
    scheduler.add(0, [1], 50)
    scheduler.complete(scheduler.plan(), {0: [1]})
    scheduler.add(1, [2] * 60, 5)
    for _ in range(9):
        step = scheduler.plan()
        assert step.chunks[0].request == 0
        assert step.num_tokens <= 8
        new = {c.request: [1] for c in step.chunks if c.wants_token}
        assert 0 in new
        scheduler.complete(step, new)
    assert 1 in new


def test_a_request_that_cannot_run_is_refused_with_the_numbers():
    scheduler = Scheduler(SchedulerConfig(max_sequence_tokens=20), PagePool(4, 4))
    with pytest.raises(ValueError, match=r"maximum context length was exceeded.*15.*9.*20"):
        scheduler.add(0, [1] * 15, 9)
    with pytest.raises(ValueError, match="do not fit into the cache of 16 tokens"):
        scheduler.add(0, [1] * 15, 3)
    scheduler.add(0, [1] * 15, 2)
    with pytest.raises(ValueError, match="queued already"):
        scheduler.add(0, [1], 1)
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.add(1, [], 1)
    with pytest.raises(
        ValueError, match="max-tokens 3 must be at least --inference-max-requests 4"
    ):
        SchedulerConfig(max_requests=4, max_tokens=3)


def test_a_page_is_never_released_twice():
    pool = PagePool(2, 1)
    page = pool.take()
    pool.release([page])
    with pytest.raises(AssertionError, match="twice"):
        pool.release([page])


def test_as_many_requests_run_together_as_their_pages_allow():
    """Four of two pages in eight; none keeps a page free that it can never use."""
    scheduler = Scheduler(SchedulerConfig(max_requests=8), PagePool(8, 4))
    for request in range(6):
        scheduler.add(request, [request] * 5, 4)  # 8 tokens are computed
    assert len(scheduler.plan().chunks) == 4
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 2)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_steps_run_ahead_while_others_wait_for_pages_but_not_past_their_turn(prefix_cache):
    config = SchedulerConfig(max_requests=8, prefix_cache=prefix_cache)
    scheduler = Scheduler(config, PagePool(4, 4))
    for request in range(3):
        scheduler.add(request, [request] * 4, 4)
    step = scheduler.plan()
    assert scheduler.num_waiting == 1
    scheduler.complete(step, {0: [1], 1: [1]})
    step = scheduler.plan()
    ahead = scheduler.plan_ahead(step)
    assert [chunk.request for chunk in ahead.chunks] == [0, 1]
    scheduler.complete(step, {0: [1], 1: [1]})
    scheduler.finish(0)
    scheduler.complete(ahead, {1: [1]})
    step = scheduler.plan()
    assert [chunk.request for chunk in step.chunks] == [1, 2]
