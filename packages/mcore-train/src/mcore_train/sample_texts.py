"""Writes texts with a model while it trains, by its weights in a serving layout.

A serving layout holds weights on other ranks than the pipeline stages and data ranks of
training, so the weights are sent between ranks; no file is written. The serving model exists
only while texts are written and draws from random streams of its own: training continues with
the same bits as without texts.
"""

from collections.abc import Callable

import torch

from mcore_ckpt.save_load.weight_transfer import transfer_weights
from mcore_infer.config import SamplingConfig
from mcore_infer.generation import prompt_ids, stream
from mcore_infer.loading import empty_model
from mcore_models.description import ModelDescription
from mcore_models.kernels.batch_invariant_model import use_batch_invariant_kernels
from mcore_models.protocol import LanguageModel
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_train.assembly import Run
from mcore_train.checkpoints.adapter_bases import model_description, model_shards


class ServingCopy:
    """Copies a run's current weights into a serving layout.

    The layout splits matrices and experts as training does. Pipeline and context ranks of the
    training layout are data ranks of the serving layout, which hold the same weights.
    """

    def __init__(self, run: Run) -> None:
        """Build the groups of the layout; all ranks call it together."""
        self.run, config = run, run.plan.config.parallelism
        layout = ParallelConfig(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        )
        self.ctx = ParallelContext.build(layout, run.ctx.device)

    def empty_model(self) -> LanguageModel:
        """Return this rank's part of the model in eval mode, with zeros as weights."""
        run, config = self.run, self.run.plan.config
        families = {run.plan.family.name: run.plan.family}
        description = ModelDescription.from_dict(model_description(run.plan), families)
        model = empty_model(description, self.ctx, run.dtype, families, config.peft)
        if config.kernels.batch_invariant_mode:
            use_batch_invariant_kernels(model)
        return model.eval()

    def model(self) -> LanguageModel:
        """Return the model with the run's current weights; all ranks call it together."""
        run, model = self.run, self.empty_model()
        target = named_shards(model, self.ctx.data_axes())
        transfer_weights(
            model_shards(run),
            {f"model.{name}": shard for name, shard in target.items()},
            world=run.ctx.world,
        )
        return model

    def close(self) -> None:
        """Destroy the groups; all ranks call it together."""
        self.ctx.destroy()


class TextWriter:
    """Writes the texts of a run whenever they are due."""

    def __init__(self, run: Run) -> None:
        """Build the groups of the serving layout; all ranks call it together.

        Raises:
            ValueError: if a prompt is empty and no token begins a document, or is longer than
                the model's positions.
        """
        self.run, options = run, run.plan.config.samples
        self.options = options
        num_positions = run.plan.config.model.max_position_embeddings
        assert run.tokenizer is not None
        for prompt in options.sample_prompts:
            length = len(prompt_ids(run.tokenizer, prompt))
            if 0 < num_positions <= length:
                raise ValueError(
                    f"--sample-prompts has a prompt of {length} tokens, and the model has "
                    f"{num_positions} positions: use less than {num_positions} tokens."
                )
        self.serving = ServingCopy(run)

    def write(self, between_tokens: Callable[[], None] = lambda: None) -> list[tuple[str, str]]:
        """Write one text per prompt with the current weights; all ranks call it together.

        Args:
            between_tokens: called after each token; what it raises, on all ranks or none, ends
                the writing.

        Returns:
            Each prompt with its new text, equal on all ranks.
        """
        run, model = self.run, self.serving.model()
        sampling = SamplingConfig(
            num_tokens=self.options.sample_num_tokens,
            temperature=self.options.sample_temperature,
        )
        tokenizer, prompts = run.tokenizer, self.options.sample_prompts
        assert tokenizer is not None
        written: list[list[int]] = [[] for _ in prompts]
        with torch.no_grad():
            for token in stream(
                model,
                [prompt_ids(tokenizer, prompt) for prompt in prompts],
                sampling,
                seed=run.plan.config.run.seed,
                eod=tokenizer.eod,
            ):
                written[token.row].append(token.id)
                between_tokens()
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
        return list(zip(prompts, texts, strict=True))

    def close(self) -> None:
        """Destroy the groups; all ranks call it together."""
        self.serving.close()
