"""A forward beside a backward: who runs when, and that neither changes what is computed."""

import torch
from torch import nn

from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import begin_all_to_all
from mcore_parallel.mesh import SINGLE
from mcore_parallel.pipeline_parallel.forward_backward_overlap import ForwardBackwardOverlap
from mcore_parallel.pipeline_parallel.runner import StageOutput, run_schedule
from mcore_parallel.pipeline_parallel.schedule import interleaved


class Layer(nn.Module):
    """Computes, exchanges, and computes again; notes each part in a list."""

    def __init__(self, events):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.5], dtype=torch.float64))
        self.events, self.change = events, None

    def set_overlap_callback(self, callback):
        self.change = callback

    def forward(self, x, name):
        def noted(x, part):
            self.events.append(f"F{name} {part}")
            if x.requires_grad:
                x.register_hook(lambda _: self.events.append(f"B{name} {part}"))
            return x

        x = noted(torch.sin(x * self.weight), "before")
        x = begin_all_to_all(x, SINGLE, [], [], self.change).wait()
        return noted(x * self.weight, "after")


def train(overlap, *, again=False, fails=False):
    events = []
    model = Layer(events)
    if overlap is not None:
        overlap.attach(nn.Sequential(model))

    def stage(_, microbatch):
        if fails and microbatch == 1:
            raise RuntimeError("no such token")
        x = torch.full((2,), 1.0 + microbatch, dtype=torch.float64)
        found = recompute(model, x, microbatch) if again else model(x, microbatch)
        return StageOutput(found.sum())

    (actions,) = interleaved(1, 3, 1, paired=True)
    try:
        run_schedule(actions, {0: stage}, pair_overlap=overlap)
    except RuntimeError as error:
        events.append(str(error))
    return events, model.weight.grad


def test_each_runs_until_its_exchange_travels_and_the_sums_keep_their_bits():
    events, grad = train(ForwardBackwardOverlap())
    assert " ".join(events).replace("before", "<").replace("after", ">") == (
        "F0 < F0 > B0 > F1 < B0 < F1 > B1 > F2 < B1 < F2 > B2 > B2 <"
    )
    alone, expected = train(None)
    assert grad.tolist() == expected.tolist()
    assert sorted(alone) == sorted(events)
    assert alone != events


def test_what_backward_computes_again_leaves_no_turn():
    events, grad = train(ForwardBackwardOverlap(), again=True)
    assert grad.tolist() == train(None)[1].tolist()
    begin = events.index("F0 before", 2)  # in the backward of the first micro-batch
    # The backward gives its turn away once, at the exchange of the gradient.
    assert events[begin:][:4] == ["F0 before", "F1 before", "B0 before", "F1 after"]


def test_a_forward_that_raises_ends_the_backward_at_its_turn():
    events, _ = train(ForwardBackwardOverlap(), fails=True)
    assert events[-1] == "no such token"
    assert "B0 after" in events
    assert "B0 before" not in events  # its exchange would wait for ranks that never come
