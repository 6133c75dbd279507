"""The engine: writes the texts of many requests, one token of each per step.

Requests may be added and cancelled between any two steps. ``step`` is the body of the loop:
plan (``Scheduler``), launch the model and choose tokens (``_launch``), read the tokens of the
launched step (``_finished_tokens``), add the tokens to their sequences (``_add_tokens``).

Continuous batching (Yu et al. 2022, Orca, OSDI) over paged memory (Kwon et al. 2023,
arXiv:2309.06180). A request's text depends only on its prompt, its sampling and its seed: not
on other requests, on how its prompt is cut into chunks, or on shared or preempted pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.beams import Beams
from mcore_infer.engine.checks import (
    check_beams,
    check_speculation,
    depends_on_length,
    has_recurrent_layers,
)
from mcore_infer.engine.fp8_cache import check_fp8_cache
from mcore_infer.engine.limits import EngineConfig
from mcore_infer.engine.model_runner import Decoder, PromptSteps
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.prefix_pages import PagePool
from mcore_infer.engine.sampling import (
    choose_on_all_ranks,
    score_prompt,
    top_log_probs,
    top_tokens,
)
from mcore_infer.engine.scheduler import Chunk, Scheduler, Step
from mcore_infer.engine.sizing import fitting_pages
from mcore_infer.engine.speculative import SpeculationCounts, build_drafter
from mcore_infer.engine.stages import from_last_stage, last_stage_logits
from mcore_infer.engine.step_layout import on_device, rows_to_choose_after
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import (
    Generation,
    NewToken,
    RunningSequence,
    ScoreRequest,
    TextRequest,
    TokenRules,
    Top,
)
from mcore_infer.writing.structured import Grammars, Matcher
from mcore_models.config import window
from mcore_models.kernels.batch_invariant import token_log_probs
from mcore_models.kernels.batch_invariant_model import FLAG, is_batch_invariant
from mcore_models.peft.stacking import StackedAdapters
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(slots=True)
class _StepInFlight:
    """A launched step whose chosen tokens the host has not read yet."""

    step: Step
    weights_version: int
    """``Engine.weights_version`` when the step was launched."""
    requests: list[int]
    """Request of each row that chooses a token; a request with proposals has several rows."""
    chosen: Tensor | None = None
    """Chosen tokens, ``[R]``, on the device."""
    ids: Tensor | None = None
    """Asynchronous copy of the chosen tokens on the host."""
    log_probs: Tensor | None = None
    """Log probabilities of the chosen tokens on the host; None: not requested."""
    is_ready: torch.cuda.Event | None = None
    """Recorded after the copies to the host."""
    top: tuple[list[int], Tensor] | None = None
    """Rows that requested the likeliest tokens, and the result of ``top_log_probs`` on the
    host."""


class Engine:
    """Writes the texts of many requests with one model, by continuous batching.

    All ranks of ``tp``, ``pp`` and the experts' axes have an engine and make the same calls.

    Attributes:
        model: whole or a stage, in eval mode.
        config: limits. ``prefix_cache`` is off for models with recurrent layers, which store
            only the state after the last token, and with proposals of ``mtp``.
        in_step: all ranks that call ``step`` together, over all replicas.
        adapters: adapters from which requests choose by name; None: no adapters are loaded.
        scheduler: waiting and running requests.
        cache: keys and values, and recurrent states.
        decoder: runs steps in which every request writes.
        prompts: runs steps with tokens of prompts.
        drafter: proposes tokens; None: a step writes one token for each request.
        speculation: counts of the proposals.
        grammars: compiles structures for the tokenizer; None: structures are refused.
        weights_version: number of the weights in ``model``, see ``weights_changed``.
        runs_ahead: whether a step may be launched before the host has read the tokens of the
            previous one. On a GPU this hides the host's work.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        draft: LanguageModel | None = None,
        in_step: Axis = SINGLE,
        adapters: StackedAdapters | None = None,
    ) -> None:
        """Build scheduler, cache and decoder; memory is allocated by the first step.

        Args:
            model: whole or a stage, in eval mode. On a GPU the plain GEMMs of its linears are
                replaced by ``FewRowsGemm``, in place.
            config: limits.
            draft: smaller model that proposes tokens, on the same ranks.
            in_step: all ranks of replicas that share experts. Each replica has its own
                requests; all replicas call ``step`` together, and a replica without work runs a
                row of padding.
            adapters: adapters of the model, from which requests choose by name.

        Raises:
            ValueError: if the model is in training mode, the model does not support the
                options, or fewer than two pages fit into memory.
        """
        if model.training:
            raise ValueError("generation needs a model in eval mode: call model.eval() first.")
        if config.fp8_cache:
            check_fp8_cache(model.config)
        in_fixed_order = is_batch_invariant(model)
        if in_fixed_order:
            if config.fp8_cache:
                raise ValueError(
                    f"{FLAG} does not support an fp8 cache: use --kv-cache-dtype model."
                )
            # Its attention reads lengths on the host, which a CUDA graph cannot do.
            config = replace(config, records_graphs=False)
        if config.num_speculative_tokens:
            check_speculation(model, config.speculative_drafts, draft, in_step)
            if adapters is not None and config.speculative_drafts == "mtp":
                raise ValueError(
                    "--speculative-drafts mtp runs a layer without the adapters of "
                    "--lora-modules: use ngram or model."
                )
        if has_recurrent_layers(model.config) or config.speculative_drafts == "mtp":
            config = replace(config, prefix_cache=False)
        if depends_on_length(model.config):
            # The rotation of all keys depends on the length of their text: a step computes one
            # text, without cutting its prompt.
            longest = max(config.max_tokens, config.max_sequence_tokens)
            config = replace(
                config,
                max_requests=1,
                max_tokens=longest,
                chunked_prefill=False,
                prefix_cache=False,
            )
        if not config.num_pages:
            config = replace(config, num_pages=fitting_pages(model, config, draft))
        self.model, self.config, self.in_step = model, config, in_step
        self.adapters = adapters
        self.device = next(model.parameters()).device
        windows = [window(model.config, layer) for layer in range(model.config.num_layers)]
        sizes = config.num_pages, config.page_tokens, config.max_requests
        self.cache = PagedCache(*sizes, config.fp8_cache)
        self.cache.in_fixed_order, self.cache.adapters = in_fixed_order, adapters
        self.scheduler = Scheduler(
            config,
            PagePool(config.num_pages, config.page_tokens),
            window=-1 if min(windows) < 0 else max(windows),
        )
        table_pages = -(-config.max_sequence_tokens // config.page_tokens)
        self.decoder = Decoder(
            model,
            self.cache,
            config.max_requests,
            table_pages,
            num_drafts=config.num_speculative_tokens,
            records_graphs=config.records_graphs,
        )
        self.prompts = PromptSteps(
            model, self.cache, config.max_tokens, table_pages, self.decoder.recorder
        )
        self.drafter = build_drafter(model, config, draft, table_pages)
        self.speculation = SpeculationCounts()
        self.grammars: Grammars | None = None
        self.weights_version = 0
        self._sequences: dict[int, RunningSequence] = {}
        self._beams = Beams()
        self._num_requests = 0
        self._flight: _StepInFlight | None = None  # launched ahead, see runs_ahead
        is_alone = self.drafter is None and in_step.size == 1
        self.runs_ahead = self.device.type == "cuda" and is_alone

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        num_tokens: int = -1,
        seed: int = 1234,
        eod: int | None = None,
        stop: Sequence[Sequence[int]] = (),
        rules: TokenRules | None = None,
        scores: ScoreRequest | None = None,
        structure: Structure | None = None,
        adapter: str = "",
    ) -> int:
        """Queue a request; no communication.

        Args:
            prompt: token ids, at least one.
            sampling: how tokens are chosen, and how many.
            num_tokens: limit of tokens to write; -1: ``sampling.num_tokens``; 0: only score the
                prompt.
            seed: seed of the random numbers that choose tokens.
            eod: token that ends the text; None: no token ends it.
            stop: token sequences that end the text and are cut off.
            rules: changes to the logits of single tokens.
            scores: log probabilities to compute; None: of the written tokens.
            structure: grammar of the text; None: any text.
            adapter: name of the adapter that writes the text; empty: the base model.

        Returns:
            The number of the request.

        Raises:
            ValueError: if the request could never run.
        """
        return self.submit(
            TextRequest(
                prompt=prompt,
                sampling=sampling,
                num_tokens=sampling.num_tokens if num_tokens < 0 else num_tokens,
                seed=seed,
                eod=eod,
                stop=stop,
                rules=rules or TokenRules(),
                scores=scores or ScoreRequest(),
                structure=structure,
                adapter=adapter,
            )
        )

    def submit(self, request: TextRequest) -> int:
        """Queue a request and return its number; no communication.

        Raises:
            ValueError: if the request could never run.
        """
        sequence = RunningSequence(request, self._matcher(request.structure))
        _check_request(self.model, sequence)
        adapter = self._adapter_number(request.adapter)
        number, scores = self._num_requests, request.scores
        if request.sampling.beam_width:
            check_beams(sequence, self.model.vocab_size)
            self.scheduler.check(sequence.prompt, sequence.num_tokens)
            self._num_requests += 1
            self._beams.begin(number, sequence, partial(self.add, adapter=request.adapter))
            return number
        self.scheduler.add(
            number,
            sequence.prompt,
            sequence.num_tokens,
            shares_prefix=not scores.prompt,
            adapter=adapter,
        )
        self._sequences[number] = sequence
        self._num_requests += 1
        return number

    def _matcher(self, structure: Structure | None) -> Matcher | None:
        if structure is None:
            return None
        if self.grammars is None:
            raise ValueError(
                "structured output needs an engine with a tokenizer: set grammars."
            )
        return self.grammars.matcher(structure)

    def _adapter_number(self, name: str) -> int:
        names = () if self.adapters is None else self.adapters.names
        if name and name not in names:
            raise ValueError(
                f"the adapter {name} is not loaded: use "
                f"{' or '.join(names) or 'the base model'}."
            )
        return names.index(name) if name else -1

    def abort(self, request: int) -> None:
        """Cancel a request; no effect if it has finished."""
        for step in self._beams.end(request):
            self.abort(step)
        if self._sequences.pop(request, None) is not None:
            self.scheduler.finish(request)
            if self.drafter is not None:
                self.drafter.forget(request)

    def weights_changed(self, version: int | None = None) -> None:
        """Discard the cache after the weights of ``model`` were changed in place.

        All ranks call this after ``transfer_weights``. Requests keep their tokens, and a
        launched step still adds its tokens; later steps read no key, value, state or prefix of
        the old weights. No communication.

        Args:
            version: number of the new weights, with which later tokens are reported; None: the
                old number plus 1.
        """
        self.weights_version = self.weights_version + 1 if version is None else version
        self.scheduler.recompute()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or the tokens of a launched step were not read."""
        return bool(self._sequences) or self._flight is not None

    @torch.no_grad()
    def step(self) -> list[NewToken | tuple[int, Generation]]:
        """Compute one step; return new tokens and finished requests.

        Communicates over ``tp`` and ``pp`` as the model does, and all-reduces the chosen
        tokens.

        Returns:
            Tokens that no stop sequence can remove any more (``row`` is the request's number),
            and a pair of number and result for each request that ended.
        """
        flight = self._flight or self._launch(self._plan())
        self._flight = None
        if flight is None:
            # This replica has no request. Replicas that share experts exchange tokens in every
            # forward, so this replica joins them with an empty step.
            if self.in_step.size > 1:
                self.decoder.run(Step(()))
            return []
        if self.runs_ahead:
            # Launch the next step before the host waits for the tokens of this one: its input
            # tokens are read on the device.
            self._flight = self._launch(self._plan_ahead(flight), flight.chosen)
        new = self._finished_tokens(flight)  # waits for the device
        ids: dict[int, list[int]] = {}
        for token in new:
            ids.setdefault(token.row, []).append(token.id)
        self.scheduler.complete(flight.step, ids)
        events = list(self._add_tokens(new, flight.weights_version))
        if self.model.config.rope_type == "longrope":
            self._recompute_beyond_context()
        return events

    def _recompute_beyond_context(self) -> None:
        """Recompute a text that exceeds LongRoPE's original context, since all angles change.

        Reference:
            Ding et al. 2024, LongRoPE. arXiv:2402.13753.
        """
        context = self.model.config.original_max_position_embeddings
        lengths = (len(s.prompt) + len(s.ids) for s in self._sequences.values() if s.ids)
        if context + 1 in lengths:  # the length at the next forward
            self.scheduler.recompute()

    def run(self) -> Iterator[NewToken | tuple[int, Generation]]:
        """Run steps until no request is left; requests may be added between steps.

        All-reduces over ``in_step`` whether any rank has work.
        """
        while self._any_rank_has_work():
            yield from self.step()

    def _any_rank_has_work(self) -> bool:
        if self.in_step.size == 1:
            return self.has_work
        return bool(all_reduce(torch.tensor(int(self.has_work)), self.in_step, "max"))

    def _plan(self) -> Step | None:
        """Plan a step, and fill in the drafter's proposals."""
        if self.drafter is None:
            return self.scheduler.plan()
        ready = {number: self._sequences[number] for number in self.scheduler.writing}
        step = self.scheduler.plan(self.drafter.wanted(ready))
        return None if step is None else self.drafter.filled(step, self._sequences)

    def _launch(
        self, step: Step | None, tokens: Tensor | None = None
    ) -> "_StepInFlight | None":
        """Launch a step without waiting for the device.

        Args:
            step: plan of the step; None: nothing is launched.
            tokens: tokens that the previous step chose, on the device, for a step planned
                ahead.
        """
        if step is None:
            return None
        logits = self._logits(step, tokens)
        scored = [chunk for chunk in step.chunks if chunk.wants_token]
        requests = [chunk.request for chunk in scored for _ in range(1 + chunk.num_drafts)]
        if not requests:
            return _StepInFlight(step, self.weights_version, [])
        offsets = None  # number of proposals before each row in its request
        if self.drafter is not None:
            offsets = [i for chunk in scored for i in range(1 + chunk.num_drafts)]
        sequences = [self._sequences[request] for request in requests]
        chosen = choose_on_all_ranks(logits, sequences, offsets, self.model)
        requested = [sequence.request.scores for sequence in sequences]
        ids = chosen.to("cpu", non_blocking=True)
        flight = _StepInFlight(step, self.weights_version, requests, chosen, ids)
        if any(scores.log_probs for scores in requested):
            log_probs = token_log_probs(logits, chosen).double()
            log_probs = from_last_stage(log_probs, self.model.pp)
            flight.log_probs = log_probs.to("cpu", non_blocking=True)
        if num_top := max(scores.num_top for scores in requested):
            rows = [i for i, scores in enumerate(requested) if scores.num_top]
            best = top_log_probs(logits[on_device(rows, self.device)], num_top)
            best = from_last_stage(best, self.model.pp)
            flight.top = rows, best.to("cpu", non_blocking=True)
        # The host waits for this event in _finished_tokens, and nowhere else.
        if chosen.is_cuda:
            flight.is_ready = torch.cuda.Event()
            flight.is_ready.record()
        return flight

    def _plan_ahead(self, flight: "_StepInFlight") -> Step | None:
        """Plan the step after a launched step whose tokens the host has not read.

        Returns None if the plan depends on these tokens: a text may end by its length, or
        penalties, a structure or proposals need the token on the host.
        """
        step = flight.step
        if not flight.requests or any(chunk.tokens[1:] for chunk in step.chunks):
            return None
        for request in flight.requests:
            sequence = self._sequences.get(request)
            if sequence is None or len(sequence.ids) + 1 >= sequence.num_tokens:
                return None
            if sequence.needs_last_token:
                return None
        return self.scheduler.plan_ahead(step)

    def _logits(self, step: Step, tokens: Tensor | None) -> Tensor:
        """Run the model; return the logits of the rows that choose a token, ``[R, V]``."""
        if all(chunk.is_writing for chunk in step.chunks):
            hidden, logits = self.decoder.run(step, tokens)
            if self.drafter is not None:
                self.drafter.follow(step, hidden)
            return logits
        rows = rows_to_choose_after(step)
        scores = [self._sequences[chunk.request].request.scores for chunk in step.chunks]
        if self.drafter is None and not any(score.prompt for score in scores):
            return last_stage_logits(self.model, self.prompts.run(step, rows))
        hidden = self.prompts.run(step)
        if self.drafter is not None:
            self.drafter.follow(step, hidden)
        parts = hidden.split([len(chunk.tokens) for chunk in step.chunks])
        for chunk, part in zip(step.chunks, parts, strict=True):
            sequence = self._sequences[chunk.request]
            if sequence.request.scores.prompt:
                score_prompt(self.model, sequence, chunk.begin, part)
        return last_stage_logits(self.model, hidden[on_device(rows, self.device)])

    def _finished_tokens(self, flight: "_StepInFlight") -> list[NewToken]:
        """Wait for a step; return the tokens of its live requests, with accepted proposals."""
        if flight.ids is None:
            return []
        if flight.is_ready is not None:
            flight.is_ready.synchronize()
        ids = flight.ids.tolist()
        log_probs = None if flight.log_probs is None else flight.log_probs.tolist()
        top: dict[int, Top] = {}
        if flight.top is not None:
            rows_with_top, best = flight.top
            top = dict(zip(rows_with_top, top_tokens(best), strict=True))
        new, row = [], 0
        for chunk in flight.step.chunks:
            begin, row = row, row + (1 + chunk.num_drafts) * chunk.wants_token
            sequence = self._sequences.get(chunk.request)
            if begin == row or sequence is None:  # no token is chosen, or the request ended
                continue
            scores = sequence.request.scores
            count = 1 if self.drafter is None else self._num_accepted(chunk, ids[begin:row])
            for i in range(begin, begin + count):
                log_prob = log_probs[i] if log_probs and scores.log_probs else None
                likeliest = top.get(i, ())[: scores.num_top]
                new.append(NewToken(chunk.request, ids[i], log_prob, likeliest))
        return new

    def _num_accepted(self, chunk: Chunk, chosen: Sequence[int]) -> int:
        """Count accepted proposals and the token after them; consume their random numbers."""
        drafts = chunk.tokens[len(chunk.tokens) - chunk.num_drafts :]
        # A proposal counts up to the first that differs from the token chosen at its position.
        rejected = (i for i, draft in enumerate(drafts) if draft != chosen[i])
        count = 1 + next(rejected, len(drafts))
        self._sequences[chunk.request].forget_draws(count)
        if chunk.num_drafts:
            self.speculation.steps += 1
            self.speculation.drafted += chunk.num_drafts
            self.speculation.accepted += count - 1
        return count

    def _add_tokens(
        self, new: Sequence[NewToken], weights_version: int
    ) -> Iterator[NewToken | tuple[int, Generation]]:
        """Add tokens to their sequences; yield the events of ``step``."""
        for token in new:
            request = token.row
            sequence = self._sequences.get(request)
            if sequence is None:  # an earlier token of this step ended the text
                continue
            sequence.note_weights(weights_version)
            released = sequence.add(token)
            if request not in self._beams:
                yield from released
            if sequence.finish_reason:
                result = sequence.result()
                self.abort(request)
                if request in self._beams:
                    add = partial(self.add, adapter=sequence.request.adapter)
                    yield from self._beams.take(request, result, add)
                else:
                    yield request, result


def _check_request(model: LanguageModel, sequence: RunningSequence) -> None:
    """Raise ValueError for a request that the model cannot compute."""
    limit, vocab_size = model.config.max_position_embeddings, model.vocab_size
    length = len(sequence.prompt)
    if limit and length + sequence.num_tokens > limit:
        raise ValueError(
            f"the maximum context length was exceeded: {length} tokens of prompt and "
            f"{sequence.num_tokens} to write are more than the {limit} positions of the "
            "model. Shorten the prompt or write fewer tokens."
        )
    rules = sequence.rules
    ids = [*sequence.prompt, *(i for i, _ in rules.bias), *(rules.never_after or ())]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"token ids {min(ids)} to {max(ids)} leave the vocabulary, 0 to {vocab_size - 1}."
        )
    top_k, num_top = sequence.sampling.top_k, sequence.request.scores.num_top
    if top_k > vocab_size or num_top > vocab_size:
        raise ValueError(
            f"--top-k {top_k} or {num_top} log probabilities a token exceed the vocabulary of "
            f"{vocab_size} tokens."
        )
