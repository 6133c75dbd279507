"""Texts that a model writes while it trains: its weights in a serving layout, for a moment.

Pipeline stages and data ranks of training hold what a serving layout needs elsewhere, so the
weights travel between the ranks' memory; no file is written. The serving model is made for the
texts and given up after them, and draws from its own random streams: training goes on to the
last bit as it would have.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_ckpt.save_load.weight_transfer import transfer_weights
from mcore_ckpt.storage.stores import as_path, is_store
from mcore_infer.config import SamplingConfig
from mcore_infer.generation import generate_text, prompt_ids
from mcore_infer.loading import empty_model
from mcore_models.description import ModelDescription
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_train.assembly import Run
from mcore_train.checkpoints.adapter_bases import model_description, model_shards
from mcore_train.reporting.log import SAMPLES

log = logging.getLogger(__name__)


class TextWriter:
    """Writes the texts of a run whenever they are due."""

    def __init__(self, run: Run) -> None:
        """Build the groups of the serving layout; all ranks call it together.

        It splits matrices and experts as training does and has no pipeline or context ranks:
        those are data ranks there, which write the same texts.

        Raises:
            ValueError: if a prompt is empty and no token begins a document, or is longer than
                the model's positions.
        """
        self.run, options = run, run.plan.config.samples
        self.options = options
        config, limit = run.plan.config.parallelism, run.plan.config.model
        assert run.tokenizer is not None
        for prompt in options.sample_prompts:
            length = len(prompt_ids(run.tokenizer, prompt))
            if 0 < limit.max_position_embeddings <= length:
                raise ValueError(
                    f"--sample-prompts has one of {length} tokens, and the model has "
                    f"{limit.max_position_embeddings} positions: shorten it."
                )
        layout = ParallelConfig(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        )
        self.ctx = ParallelContext.build(layout, run.ctx.device)

    def write(self) -> list[str]:
        """Write one text a prompt with the weights as they are; all ranks call it together.

        Returns:
            The new text of each prompt, equal on all ranks.
        """
        run = self.run
        families = {run.plan.family.name: run.plan.family}
        description = ModelDescription.from_dict(model_description(run.plan), families)
        peft = run.plan.config.peft
        model = empty_model(description, self.ctx, run.dtype, families, peft)
        target = named_shards(model, self.ctx.data_axes())
        transfer_weights(
            model_shards(run),
            {f"model.{name}": shard for name, shard in target.items()},
            world=run.ctx.world,
        )
        model.eval()
        sampling = SamplingConfig(
            num_tokens=self.options.sample_num_tokens,
            temperature=self.options.sample_temperature,
        )
        assert run.tokenizer is not None
        with torch.no_grad():
            texts = generate_text(
                model,
                run.tokenizer,
                self.options.sample_prompts,
                sampling,
                seed=run.plan.config.run.seed,
            )
        if run.ctx.world.rank == 0:
            self._keep(list(zip(self.options.sample_prompts, texts, strict=True)))
        return texts

    def close(self) -> None:
        """Destroy the groups; all ranks call it together."""
        self.ctx.destroy()

    def _keep(self, texts: Sequence[tuple[str, str]]) -> None:
        for prompt, text in texts:
            log.info(" sample at iteration %d | %s%s", self.run.iteration, prompt, text)
        save = self.run.plan.config.saving.save
        if not save or is_store(as_path(save)):
            return
        Path(save).mkdir(parents=True, exist_ok=True)
        with (Path(save) / SAMPLES).open("a", encoding="utf-8") as file:
            for prompt, text in texts:
                line = {"iteration": self.run.iteration, "prompt": prompt, "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
