"""Plans each step of the engine: tokens of requests, and their pages; no tensors.

A step has at most ``max_tokens`` tokens. Requests that write come first with one token each, so
that a long prompt never delays them; prompts fill the rest, cut into chunks if they do not fit.
When pages run out, the request that arrived last is preempted: its pages are released, and its
tokens are computed again later. The oldest request always continues, so all requests end. Plans
depend only on earlier calls, so all ranks make equal plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from mcore_infer.engine.limits import SchedulerConfig
from mcore_infer.engine.prefix_pages import FIRST_KEY, Key, PagePool, next_key

_NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request within a step."""

    request: int
    """Number of the request."""
    slot: int
    """Row of recurrent states, below ``max_requests``; fixed while the request runs."""
    begin: int
    """Position of the first token."""
    tokens: tuple[int, ...]
    """Token ids to run through the model. ``(-1,)``: the token that the previous step, still
    in flight, chooses."""
    pages: tuple[int, ...]
    """Pages of the request up to the last of ``tokens``; -1: a page outside every attention
    window, which has been released."""
    wants_token: bool
    """Whether the step chooses the token that follows ``tokens``."""
    num_drafts: int = 0
    """Proposals at the end of ``tokens``; the step also chooses a token in place of each."""
    adapter: int = -1
    """Number of the request's adapter; -1: none."""

    @property
    def is_writing(self) -> bool:
        """Whether the step chooses a token after each of the chunk's tokens."""
        return self.wants_token and len(self.tokens) == 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Step:
    """The chunks of one forward."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class _Request:
    """A waiting or running request: tokens, pages, and the number of computed tokens."""

    id: int
    tokens: list[int]
    shares_prefix: bool
    order: int  # number of earlier arrivals
    keys: list[Key]  # the adapter's first key, then the key of each complete page
    most_pages: int  # pages of the request's longest possible text
    adapter: int
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # pages that other requests may share
    slot: int = -1
    num_in_flight: int = 0
    is_over: bool = False

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed - self.num_in_flight


class Scheduler:
    """Decides which requests each step of one engine computes.

    Attributes:
        config: limits.
        pool: pages of the cache.
        window: the widest attention window of any layer; -1: some layer attends to all tokens.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool, *, window: int = -1) -> None:
        """Start with no requests.

        Args:
            config: limits.
            pool: pages of the cache, all free.
            window: the widest attention window of the model's layers. Pages before the window
                are released while a request runs. -1: some layer attends to all tokens.
        """
        self.config, self.pool, self.window = config, pool, window
        self._waiting: list[_Request] = []  # by order of arrival
        self._running: list[_Request] = []  # by order of arrival
        self._requests: dict[int, _Request] = {}
        self._slots = list(range(config.max_requests - 1, -1, -1))
        self._num_arrived = 0
        self._is_stale = False

    @property
    def num_running(self) -> int:
        """Number of requests with pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to start, or were preempted."""
        return len(self._waiting)

    def add(
        self,
        request: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        shares_prefix: bool = True,
        adapter: int = -1,
    ) -> None:
        """Queue a request.

        Args:
            request: a number that no waiting or running request has.
            prompt: token ids, at least one.
            max_new_tokens: limit of tokens to write; 0: the request ends after its prompt.
            shares_prefix: whether the request may use pages that other requests computed; False
                if log probabilities of its prompt are requested.
            adapter: number of the request's adapter; -1: none. Requests of different adapters
                share no pages.
        """
        if request in self._requests:
            raise ValueError(f"request {request} is queued already")
        self.check(prompt, max_new_tokens)
        keys, order = [FIRST_KEY], self._num_arrived
        if adapter >= 0:  # an adapter's keys and values differ: give its prefixes other keys
            keys = [next_key(FIRST_KEY, [adapter])]
        most_pages = self._num_pages(_most_computed(prompt, max_new_tokens))
        new = _Request(request, list(prompt), shares_prefix, order, keys, most_pages, adapter)
        self._num_arrived += 1
        self._requests[request] = new
        self._waiting.append(new)

    def check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise ValueError for a request that could never run."""
        if not prompt or max_new_tokens < 0:
            raise ValueError("a request needs a prompt of at least one token.")
        limit, total = self.config.max_sequence_tokens, len(prompt) + max_new_tokens
        if total > limit:
            raise ValueError(
                f"the maximum context length was exceeded: {len(prompt)} tokens of prompt and "
                f"{max_new_tokens} to write are more than --inference-max-seq-length {limit}. "
                "Shorten the prompt or write fewer tokens."
            )
        computed = _most_computed(prompt, max_new_tokens)
        if self._num_pages(computed) > self.pool.num_pages:
            cache_tokens = self.pool.num_pages * self.pool.page_tokens
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {max_new_tokens} to write do not fit into "
                f"the cache of {cache_tokens} tokens: raise "
                "--inference-dynamic-batching-buffer-size-gb, or write fewer tokens."
            )
        if not self.config.chunked_prefill and computed > self.config.max_tokens:
            raise ValueError(
                f"{computed} tokens do not fit into a step of "
                f"--inference-dynamic-batching-max-tokens {self.config.max_tokens} without "
                "--enable-chunked-prefill."
            )

    @property
    def writing(self) -> list[int]:
        """Requests whose next step computes one token, by order of arrival."""
        return [r.id for r in self._running if r.num_left == 1 and not r.is_over]

    def plan(self, drafts: Mapping[int, Sequence[int]] = _NO_DRAFTS) -> Step | None:
        """Return the next step; None if nothing can be computed now.

        A request whose tokens are in flight is left out until ``complete``.

        Args:
            drafts: proposed next tokens of requests that are ``writing``. The step uses the
                proposals that fit after one token of each request, and into free pages.
        """
        if self._is_stale and not self._start_over():
            return None
        chunks: dict[int, Chunk] = {}
        num_waiting = len(self._waiting)
        budget = self.config.max_tokens  # tokens that the step can still take
        # Writing requests come first, with one token each. The rest of the budget (spare) may
        # go to proposals; then running prompts continue; then waiting requests start.
        is_writing = [r for r in self._running if r.num_left == 1]
        is_reading = [r for r in self._running if r.num_left > 1]
        spare = budget - len(is_writing)
        for request in is_writing + is_reading:
            if request.slot < 0:  # preempted for an older request in this loop
                continue
            count = self._share(request, budget)
            if count and self._make_room(request, count, chunks):
                proposed: Sequence[int] = ()
                if request.id in drafts:
                    proposed = self._fitting(request, drafts[request.id][:spare])
                spare -= len(proposed)
                chunks[request.id] = self._chunk(request, count, proposed)
                budget -= count + len(proposed)
        # No request starts in a step that preempted another: there are too few pages.
        is_short = len(self._waiting) > num_waiting
        while not is_short and self._waiting and self._slots:
            request = self._waiting[0]
            count = self._begin(request, budget)
            if not count:
                break
            self._running.append(self._waiting.pop(0))
            self._running.sort(key=lambda r: r.order)
            chunks[request.id] = self._chunk(request, count)
            budget -= count
        if not chunks:
            return None
        for chunk in chunks.values():
            self._requests[chunk.request].num_in_flight = len(chunk.tokens)
        return Step(tuple(chunks.values()))

    def plan_ahead(self, step: Step) -> Step | None:
        """Plan the next step before the tokens that ``step`` chooses are on the host.

        Returns:
            A step of the same requests, one token each, with -1 in place of the token; to be
            completed after ``step``. None if the next plan could be a different one, because a
            request may start, or a page may be missing.
        """
        requests = [self._requests[chunk.request] for chunk in step.chunks]
        if self._is_stale:
            return None
        if len(requests) != len(self._running) or self._may_begin():
            return None
        if any(r.is_over or r.num_left or r.num_in_flight != 1 for r in requests):
            return None
        # One token is in flight and one follows it: pages must hold num_computed + 2 tokens.
        needed = [self._num_pages(r.num_computed + 2) - len(r.pages) for r in requests]
        if sum(needed) > self.pool.num_free:
            return None
        chunks = []
        for request, count, before in zip(requests, needed, step.chunks, strict=True):
            # Pass the same tuple if no page was added or released: the copy to the device skips
            # rows whose tuple is identical.
            pages = before.pages
            if count or self.window >= 0:
                request.pages += [self.pool.take() for _ in range(count)]
                pages = tuple(request.pages)
            request.num_in_flight += 1
            begin = request.num_computed + 1
            chunks.append(
                Chunk(
                    request.id,
                    request.slot,
                    begin,
                    (-1,),
                    pages,
                    wants_token=True,
                    adapter=request.adapter,
                )
            )
        return Step(tuple(chunks))

    def complete(self, step: Step, new_tokens: Mapping[int, Sequence[int]]) -> None:
        """Record the results of a step.

        Args:
            step: a step of ``plan`` or ``plan_ahead``.
            new_tokens: by request, the accepted proposals and the chosen token after them; for
                every chunk with ``wants_token`` whose request has not been ended.
        """
        for chunk in step.chunks:
            request = self._requests[chunk.request]
            request.num_computed += len(chunk.tokens)
            # Of 1 + num_drafts tokens, as many are valid as were chosen. The next step
            # overwrites the keys of rejected proposals.
            if chunk.num_drafts and not request.is_over:
                request.num_computed -= 1 + chunk.num_drafts - len(new_tokens[chunk.request])
            request.num_in_flight -= len(chunk.tokens)
            if request.is_over:
                if not request.num_in_flight:
                    self._drop(request)
                continue
            if chunk.wants_token:
                request.tokens += new_tokens[chunk.request]
            self._publish(request)
            self._leave_window(request)

    def finish(self, request: int) -> None:
        """End a request; its pages are released once no step in flight writes to them."""
        ending = self._requests[request]
        if ending.num_in_flight:
            ending.is_over = True
        else:
            self._drop(ending)

    def recompute(self) -> None:
        """Release all pages before the next plan, so that all tokens are computed again.

        Requests keep their tokens. Takes effect once the steps in flight are complete. Used
        after the weights have changed.
        """
        self._is_stale = True

    def _start_over(self) -> bool:
        """Preempt all requests and unpublish prefixes; return False if a step is in flight."""
        if any(request.num_in_flight for request in self._running):
            return False
        for request in list(self._running):
            self._preempt(request)
        self.pool.forget_prefixes()
        self._is_stale = False
        return True

    def has(self, request: int) -> bool:
        """Whether a request waits or runs."""
        queued = self._requests.get(request)
        return queued is not None and not queued.is_over

    def _share(self, request: _Request, budget: int) -> int:
        """Return the number of a request's tokens that fit into the rest of a step."""
        if request.num_in_flight or request.is_over:
            return 0
        if request.num_left <= budget:
            return request.num_left
        return budget if self.config.chunked_prefill else 0

    def _begin(self, request: _Request, budget: int) -> int:
        """Allocate the first pages of a waiting request; return its number of tokens.

        0: the request cannot start in this step.
        """
        if not budget:
            return 0
        page_tokens = self.pool.page_tokens
        if self.config.prefix_cache and request.shares_prefix:
            # The last token is never shared: its logits are needed to choose the next token.
            keys = self._keys(request)[: (len(request.tokens) - 1) // page_tokens]
            request.pages = self.pool.share_prefix(keys)
            request.num_published = len(request.pages)
            request.num_computed = len(request.pages) * page_tokens
        count = self._share(request, budget)
        needed = self._num_pages(request.num_computed + count) - len(request.pages)
        # Keep a page for each running request that may still grow.
        if not count or needed + self._num_growing() > self.pool.num_free:
            self._release(request)
            return 0
        request.pages += [self.pool.take() for _ in range(needed)]
        request.slot = self._slots.pop()
        return count

    def _may_begin(self) -> bool:
        """Whether ``plan`` might start a waiting request; errs towards True."""
        if not (self._waiting and self._slots):
            return False
        first, budget = self._waiting[0], self.config.max_tokens - len(self._running)
        min_new_pages = 1  # all other pages may be shared
        if not (self.config.prefix_cache and first.shares_prefix):
            min_new_pages = self._num_pages(self._share(first, budget))
        return min_new_pages + self._num_growing() <= self.pool.num_free

    def _num_growing(self) -> int:
        """Count running requests that may need a further page.

        When a request starts, one free page is reserved for each of them; otherwise the new
        request could be preempted immediately.
        """
        return sum(len(request.pages) < request.most_pages for request in self._running)

    def _make_room(self, request: _Request, count: int, chunks: dict[int, Chunk]) -> bool:
        """Allocate pages for a request's next tokens, preempting younger requests if needed.

        Returns:
            False if the request itself was preempted, or waits for a younger one in flight.
        """
        needed = self._num_pages(request.num_computed + count) - len(request.pages)
        while self.pool.num_free < needed:
            # Candidates for preemption: this request and younger ones, unless a step in flight
            # writes to their pages or this step already has them.
            later = [r for r in self._running if r.order >= request.order]
            idle = [r for r in later if not r.num_in_flight and r.id not in chunks]
            if idle == [request] and len(later) > 1:
                return False  # all younger requests are in flight: preempt one in a later plan
            self._preempt(idle[-1])
            if idle[-1] is request:
                return False
        request.pages += [self.pool.take() for _ in range(needed)]
        return True

    def _preempt(self, request: _Request) -> None:
        self._running.remove(request)
        self._release(request)
        self._waiting.append(request)
        self._waiting.sort(key=lambda r: r.order)

    def _release(self, request: _Request) -> None:
        self.pool.release([page for page in request.pages if page >= 0])
        request.pages, request.num_computed, request.num_published = [], 0, 0
        if request.slot >= 0:
            self._slots.append(request.slot)
            request.slot = -1

    def _drop(self, request: _Request) -> None:
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)
        del self._requests[request.id]

    def _fitting(self, request: _Request, drafts: Sequence[int]) -> Sequence[int]:
        """Allocate pages for proposals; return the proposals that fit without preemption."""
        # Room for proposals: tokens of free pages and of the request's pages, less the computed
        # tokens and the last token of the text.
        free = self.pool.num_free + len(request.pages)
        drafts = drafts[: free * self.pool.page_tokens - request.num_computed - 1]
        missing = self._num_pages(request.num_computed + 1 + len(drafts)) - len(request.pages)
        request.pages += [self.pool.take() for _ in range(missing)]
        return drafts

    def _chunk(self, request: _Request, count: int, drafts: Sequence[int] = ()) -> Chunk:
        begin = request.num_computed
        return Chunk(
            request.id,
            request.slot,
            begin,
            (*request.tokens[begin : begin + count], *drafts),
            tuple(request.pages),
            wants_token=begin + count == len(request.tokens),
            num_drafts=len(drafts),
            adapter=request.adapter,
        )

    def _publish(self, request: _Request) -> None:
        """Publish the pages of a request that have become complete."""
        if not self.config.prefix_cache:
            return
        complete = request.num_computed // self.pool.page_tokens
        for i in range(request.num_published, complete):
            self.pool.publish(request.pages[i], self._keys(request)[i])
        request.num_published = complete

    def _keys(self, request: _Request) -> list[Key]:
        """Return the keys of a request's complete pages, computing the missing ones."""
        size = self.pool.page_tokens
        keys = request.keys
        # keys[0] is the key before the first page, so len(keys) - 1 pages have keys.
        for begin in range((len(keys) - 1) * size, len(request.tokens) - size + 1, size):
            keys.append(next_key(keys[-1], request.tokens[begin : begin + size]))
        return keys[1:]

    def _leave_window(self, request: _Request) -> None:
        """Release the pages that no later token attends to, and replace their numbers by -1."""
        if self.window < 0:
            return
        num_out = max(0, request.num_computed - self.window) // self.pool.page_tokens
        self.pool.release([page for page in request.pages[:num_out] if page >= 0])
        request.pages[:num_out] = [-1] * num_out

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_tokens)


def _most_computed(prompt: Sequence[int], max_new_tokens: int) -> int:
    """Return the largest number of tokens to compute; the last new token is only chosen."""
    return len(prompt) + max(0, max_new_tokens - 1)
