r"""Runs lm-evaluation-harness on mcore models, in one process.

    python -m mcore_infer.evaluation.harness --model mcore \
        --model_args load=runs/tiny --tasks hellaswag

The arguments are those of ``lm_eval``, which cannot find models of other packages. Texts are
tokenized as by the harness' ``hf`` model, so that scores can be compared. Under torchrun all
ranks run the harness: tensor ranks split the model, data ranks the rows.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any, Literal

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.evaluation.continuations import Continuation, score_continuations
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

NAME = "mcore"
"""Value of ``--model``."""


def adapter_class() -> type:
    """Return ``Requests`` as a subclass of the harness' model class.

    Raises:
        ValueError: if lm-evaluation-harness is not installed.
    """
    try:
        template: Any = import_module("lm_eval.api.model").TemplateLM
    except ImportError as error:
        raise ValueError(
            f"lm-evaluation-harness is not installed ({error}): pip install "
            "'mcore-infer[lm-eval]'."
        ) from None
    return type("McoreLM", (Requests, template), {})


class Requests:
    """Answers the harness' requests with an mcore model.

    ``adapter_class`` adds the harness' base class, which is imported only when needed.
    """

    cache_hook: Any

    def __init__(
        self,
        load: str = "",
        *,
        tokenizer: Any = "",
        model: LanguageModel | None = None,
        batch_size: int | str = 8,
        max_length: int = 0,
        max_gen_toks: int = 256,
        device: str | None = None,
        tensor_model_parallel_size: int = 0,
        data_axis: Axis = SINGLE,
        **ignored: Any,
    ) -> None:
        """Load a model, or use a loaded one.

        Args:
            load: folder, as ``mcore-infer eval --load``.
            tokenizer: folder or file; with ``model``, a tokenizer object.
            model: in eval mode.
            batch_size: rows in one forward pass; ``auto``: 8.
            max_length: largest context in tokens; 0: the model's positions, or 2048.
            max_gen_toks: largest number of tokens to generate, if the task has no limit.
            device: ``cpu``; ``cuda``, with or without an index, or None: cuda if the machine
                has a GPU.
            tensor_model_parallel_size: ranks that split each matrix; 0: all started ranks.
            data_axis: data ranks of ``model`` that share rows.
            ignored: arguments that the harness passes to all models; must be None, except
                ``max_batch_size``.
        """
        super().__init__()
        unknown = [k for k, v in ignored.items() if v is not None and k != "max_batch_size"]
        if unknown:
            raise ValueError(
                f"--model_args {', '.join(unknown)}: not arguments of the model {NAME}. Leave "
                "them out."
            )
        if model is None:
            if not load:
                raise ValueError("--model_args needs load=DIR, the model to evaluate.")
            model, tokenizer, data_axis = _opened(
                load, tokenizer, device, tensor_model_parallel_size
            )
        self.model, self.tokens, self.data_axis = model, tokenizer, data_axis
        self.batch_size = 8 if batch_size == "auto" else int(batch_size)
        self.max_length = max_length or model.config.max_position_embeddings or 2048
        self.max_gen_toks = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return self.tokens.eod

    @property
    def prefix_token_id(self) -> int:
        """Token that is the context of a text without context."""
        return self.tokens.eod if self.tokens.bos is None else self.tokens.bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in caches of requests."""
        return str(self.tokens.fingerprint())

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokenize a text, by default with special tokens unless the text begins with BOS."""
        bos = self.tokens.bos
        has_bos = bos is not None and string.startswith(self.tokens.decode([bos]))
        if add_special_tokens is None:
            add_special_tokens = not has_bos
        return list(self.tokens.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        rows = []
        for _pair, context, target in requests:
            # Keep the end of a long row; its first token must remain as context.
            ids = [*context, *target][-(self.max_length + 1) :]
            rows.append(Continuation(ids, min(len(target), len(ids) - 1)))
        scores = score_continuations(
            self.model, rows, batch=self.batch_size, axis=self.data_axis
        )
        results = [(score.log_prob, score.is_greedy) for score in scores]
        for (pair, *_rest), result in zip(requests, results, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text, in windows that count every token once."""
        del disable_tqdm
        utils: Any = import_module("lm_eval.utils")
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(
            owners, self._loglikelihood_tokens(windows), strict=True
        ):
            totals[owner] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, cut before the first stop string."""
        del disable_tqdm
        texts = []
        for request in requests:
            context, options = request.args
            texts.append(self._written(context, dict(options)))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _written(self, context: str, options: dict[str, Any]) -> str:
        from mcore_infer.generation import generate

        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        limit = int(options.pop("max_gen_toks", self.max_gen_toks))
        prompt = self.tok_encode(context)[-max(1, self.max_length - limit) :]
        sampling = _sampling(options, limit)
        (generation,) = generate(
            self.model,
            [prompt or [self.prefix_token_id]],
            sampling,
            eod=self.tokens.eod,
            stop=[self.tokens.encode(word, add_special_tokens=False) for word in until],
        )
        text = self.tokens.decode(generation.ids, skip_special_tokens=True)
        return _cut(text, until)


class HarnessTasks:
    """Tasks of the harness, loaded once, that score models of this process."""

    def __init__(self, names: Sequence[str]) -> None:
        """Load the tasks and their data by the harness, from the Hub or from files.

        Args:
            names: names of tasks or groups, or YAML files of tasks.

        Raises:
            ValueError: if the harness is not installed, a task cannot be loaded, or two names
                contain the same task.
        """
        self._adapter = adapter_class()
        self._manager: Any = import_module("lm_eval.tasks").TaskManager()
        self._tasks: list[Any] = []
        for name in names:
            try:
                loaded = self._manager.load([name])
            except Exception as error:
                raise ValueError(
                    f"lm-evaluation-harness cannot load the task {name} "
                    f"({type(error).__name__}: {error}); `lm_eval ls tasks` lists its tasks."
                ) from error
            # A name may be a group, which may contain groups, or one or several tasks. Keep
            # the outermost groups only, because they contain the others.
            inner = {child for group in loaded["group_map"].values() for child in group}
            outer = [group for key, group in loaded["groups"].items() if key not in inner]
            self._tasks += outer or loaded["tasks"].values()
        self._manager.load(self._tasks)  # raises for a task that two names contain

    def scores(
        self, model: LanguageModel, tokenizer: Tokenizer, *, context_tokens: int, axis: Axis
    ) -> dict[str, Mapping[str, float]]:
        """Evaluate a model on all tasks; return the metrics of each task by name.

        All ranks call this together; ranks with a LOCAL_RANK above 0 get an empty result. The
        random states of Python, NumPy and torch do not change.

        Args:
            model: in eval mode.
            tokenizer: tokenizer of the model.
            context_tokens: largest number of tokens of a row.
            axis: data ranks that share the rows.
        """
        evaluate: Any = import_module("lm_eval.evaluator").simple_evaluate
        api = self._adapter(
            model=model, tokenizer=tokenizer, max_length=context_tokens, data_axis=axis
        )
        seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # no progress bars
            evaluation = evaluate(
                api,
                tasks=self._tasks,
                task_manager=self._manager,
                bootstrap_iters=0,
                log_samples=False,
                **seeds,  # None: the harness does not change random states
            )
        rows = evaluation["results"] if evaluation else {}
        return {name: _metrics(row) for name, row in rows.items()}


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a task's numbers, renamed from the harness' ``metric,filter`` to metric_filter."""
    return {
        key.removesuffix(",none").replace(",", "_"): float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key != "sample_len"
    }


def _sampling(options: dict[str, Any], num_tokens: int) -> SamplingConfig:
    """Convert a task's ``generation_kwargs`` to a SamplingConfig; the default is greedy."""
    draws = options.pop("do_sample", False)
    temperature = float(options.pop("temperature", 1.0 if draws else 0.0))
    top_p, top_k = float(options.pop("top_p", 0.0)), int(options.pop("top_k", 0))
    if options:
        raise ValueError(
            f"generation_kwargs {sorted(options)}: not supported by the model {NAME}. Use "
            "do_sample, temperature, top_p and top_k."
        )
    if not draws or temperature == 0.0:
        return SamplingConfig(num_tokens=num_tokens, top_k=1)
    return SamplingConfig(
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=0.0 if top_k or top_p == 1.0 else top_p,
    )


def _cut(text: str, until: Iterable[str]) -> str:
    """Cut a text before the first stop string."""
    ends = [text.find(word) for word in until if word and word in text]
    return text[: min(ends, default=len(text))]


def _opened(
    load: str, tokenizer: str, device: str | None, tp: int
) -> tuple[LanguageModel, Tokenizer, Axis]:
    """Join the world and load a model; both are closed when the process exits."""
    import atexit

    from mcore_infer.commands.opening import ModelOptions, opened

    kinds: dict[str, Literal["cpu", "auto"]] = {"cpu": "cpu", "cuda": "auto"}
    device_option = kinds[device.partition(":")[0]] if device else "auto"
    options = ModelOptions(
        load=load, tokenizer=tokenizer, device=device_option, tensor_model_parallel_size=tp
    )
    context = opened(options)
    loaded, tokens, _ = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return loaded.model, tokens, loaded.data


def main(argv: Sequence[str] | None = None) -> None:
    """Run the harness' command with the model ``mcore``; only rank 0 prints.

    Raises:
        ValueError: if the harness is not installed.
    """
    adapter = adapter_class()
    from mcore_parallel.launch.launcher import read_environment

    import_module("lm_eval.api.registry").register_model(NAME)(adapter)
    evaluate = import_module("lm_eval.__main__").cli_evaluate
    if argv is not None:
        sys.argv[1:] = argv
    if read_environment().rank == 0:
        evaluate()
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        evaluate()


if __name__ == "__main__":
    main()
