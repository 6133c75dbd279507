"""Every decoder family: our model is transformers', by logits, gradients, files and texts."""

import pytest
import torch
from parity.family_cases import CASES, SEEING, build, build_seeing
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_ckpt.conversion.conversion import hf_to_mcore, mcore_to_hf
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families import find_family
from mcore_ckpt.formats.text_towers import text_tower
from mcore_ckpt.save_load.loading import load, read_index
from mcore_infer import Engine, EngineConfig, SamplingConfig, ScoreRequest
from mcore_infer.kv_cache import StaticCache
from mcore_models.description import ModelDescription
from mcore_models.families import FAMILIES
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards

# Buffers of theirs that take part in what a model computes.
UNTRAINED = ("e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta")
NOT_TRAINED = (".expert_bias", ".output_scale.weight", ".xielu.beta", ".xielu.eps")
# Functions of a head's and a layer's number, which minimax stores; they are left out.
COMPUTED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
ROUTED_IN_FLOAT32 = ("glm4_moe", "dots1", "ernie4_5_moe", "lfm2_moe", "hunyuan_v1_moe")
ROUTED_IN_FLOAT32 += ("glm4_moe_lite", "minimax_m2", "deepseek_v32", "kimi_linear")
VOCAB, LENGTH, NEW = 37, 23, 2
# transformers rotates and norms in float32 whatever the model's dtype: 1e-7 a step.
ROUNDING = 2e-5


def theirs(name, folder):
    """Save a random model of theirs; return tokens, logits, and what it writes behind."""
    torch.manual_seed(3)
    model = (build_seeing if name in SEEING else build)(name).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for path, buffer in model.named_buffers():
            if path.endswith(UNTRAINED):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder / "hf")
    tokens = torch.randint(VOCAB - 1, (2, LENGTH))
    logits = model(tokens).logits
    text = tokens
    with torch.no_grad():
        for _ in range(NEW):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return tokens, logits.detach(), text[:, LENGTH:].tolist()


def loaded(run, **degrees):
    """Build the model that a run folder describes and fill it."""
    description = ModelDescription.from_dict(read_index(run / "release").extra["model"])
    ctx = ParallelContext.build(ParallelConfig(**degrees))
    model = FAMILIES[description.family].build(
        description.config,
        ctx,
        vocab_size=description.vocab_size,
        moe=description.moe,
        dtype=torch.float64,
    )
    shards = {f"model.{n}": s for n, s in named_shards(model, ctx.data_axes()).items()}
    load(run, shards, world=ctx.world, cast=True)  # the balance of experts stays float32
    return model, ctx


def scored(run, tokens, **degrees):
    """Return this rank's logits, loss and gradients by logical name, as slices of the whole."""
    model, ctx = loaded(run, **degrees)
    hidden, _ = model(tokens)
    logits = model.logits(hidden).transpose(0, 1)  # [S, B, V] -> [B, S, V]
    weights = torch.full(tokens.shape, 1 / tokens[:, 1:].numel(), dtype=torch.float64)
    weights[:, -1] = 0
    loss, _ = model.loss(hidden, tokens.roll(-1, 1), weights)
    loss.backward()
    for parameter in model.parameters():
        zeros = torch.zeros_like(parameter)
        parameter.data = zeros if parameter.grad is None else parameter.grad
    gradients = {
        name: [(piece.offsets, piece.lengths, piece.data.clone()) for piece in shard.pieces]
        for name, shard in named_shards(model).items()
        if not name.endswith(NOT_TRAINED)
    }
    ctx.destroy()
    return logits.detach(), loss.detach(), gradients


def error(got, want, least=0.0):
    return ((got - want).abs().max() / max(want.abs().max().item(), least)).item()


@pytest.mark.parametrize("name", CASES)
def test_a_family_computes_what_transformers_does(tmp_path, name):
    tokens, wanted, text = theirs(name, tmp_path)
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    logits, loss, gradients = scored(tmp_path / "run", tokens)
    assert error(logits[..., :VOCAB], wanted) < ROUNDING
    # Their gradients come under our names by the rules that weights come by.
    hf_to_mcore(
        tmp_path / "gradients", tmp_path / "run_gradients", ConvertOptions(verify=False)
    )
    there, _ = loaded(tmp_path / "run_gradients")
    shards = named_shards(there)
    largest = max(shard.pieces[0].data.abs().max().item() for shard in shards.values())
    for part, pieces in gradients.items():
        ((_, _, got),) = pieces
        worst = error(got, shards[part].pieces[0].data.detach(), 1e-3 * largest)
        assert worst < 20 * ROUNDING, (part, worst)
    flat = torch.nn.functional.cross_entropy
    assert error(loss, flat(wanted[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())) < ROUNDING
    same_from_a_cache(tmp_path / "run", tokens, logits, name, text)
    mcore_to_hf(tmp_path / "run", tmp_path / "again")
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("hf", "again"))
    new_names = find_family(name).renames(before) if name == "kimi_linear" else {}
    before = {new_names.get(key, key): tensor for key, tensor in before.items()}
    before = {key: tensor for key, tensor in before.items() if not key.endswith(COMPUTED)}
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    if name in (
        "gemma2",
        "olmo2",
        "apertus",
        "gpt_oss",
        "qwen3_moe",
        "granite",
        "cohere",
        "phi3 longrope",
        "qwen3_next",
        "gemma3n_text",
        "gemma4_text with vectors for each layer",
        "lfm2",
        "minimax",
        "kimi_linear",
        "granitemoehybrid",
    ):
        slices = run_ranks(scored_split, 2, tmp_path / "run", tokens)
        # Routers in float32 round the sums of two ranks otherwise.
        bound = 1e-6 if name in ROUTED_IN_FLOAT32 else 1e-9
        check_split(slices, logits, gradients, largest, bound)


@pytest.mark.parametrize("name", SEEING)
def test_the_text_tower_of_a_model_that_sees_computes_what_it_does(tmp_path, name):
    tokens, wanted, _ = theirs(name, tmp_path)
    hf_to_mcore(tmp_path / "hf", tmp_path / "run")
    logits, _, _ = scored(tmp_path / "run", tokens)
    assert error(logits[..., :VOCAB], wanted) < ROUNDING
    same_ties(name)


def same_ties(name):
    """Outer and inner fields tie embedding and head here where they do there."""
    model = build_seeing(name)
    stated = model.config.to_dict()
    for outer, inner in ((True, False), (False, True), (False, False)):
        text = stated["text_config"] | {"tie_word_embeddings": inner}
        config = stated | {"tie_word_embeddings": outer, "text_config": text}
        model.config = type(model.config).from_dict(config)
        tied = bool(model.get_expanded_tied_weights_keys(all_submodels=False))
        assert text_tower(config, {})[0]["tie_word_embeddings"] is tied, (outer, inner)


def same_from_a_cache(run, tokens, logits, name, text):
    """Tokens in pieces, remembered, give the logits of all at once; an engine writes on."""
    if "dynamic" in name or "longrope" in name:
        return  # what is remembered was rotated for a shorter sequence, theirs likewise
    model, ctx = loaded(run)
    cache, found = StaticCache(LENGTH), []
    with torch.no_grad():
        for piece in tokens.split([9, 1, LENGTH - 10], 1):
            hidden, _ = model.eval()(piece, state=cache)
            cache.advance(piece.shape[1])
            found.append(model.logits(hidden))
    # These routers compute in float32 whatever the model's dtype, theirs likewise.
    bound = 1e-6 if name in ROUTED_IN_FLOAT32 else 1e-10
    assert error(torch.cat(found).transpose(0, 1), logits) < bound
    assert_written(model, tokens, logits, text)
    ctx.destroy()


def assert_written(model, tokens, logits, text):
    """Requests write and score alike: two at a time, prompts in chunks, then from pages."""
    pages = {"page_tokens": 4, "num_pages": 20, "max_sequence_tokens": 32}
    engine = Engine(model, EngineConfig(**pages, max_requests=2, max_tokens=24))
    for is_scored in (True, False):
        numbers = [
            engine.add(
                row,
                SamplingConfig(num_tokens=NEW, top_k=1),
                scores=ScoreRequest(log_probs=False, prompt=is_scored),
            )
            for row in tokens.tolist()
        ]
        found = dict(event for event in engine.run() if isinstance(event, tuple))
        assert [list(found[number].ids) for number in numbers] == text
        if is_scored:
            scores = torch.tensor([found[number].prompt_log_probs for number in numbers])
            own = logits[:, :-1, :VOCAB].log_softmax(-1).gather(-1, tokens[:, 1:, None])
            assert error(scores, own[..., 0]) < 1e-6


def scored_split(run, tokens):
    return scored(run, tokens, tensor_model_parallel_size=2)


def check_split(slices, logits, gradients, largest, bound):
    """Two tensor ranks give the logits and, in their pieces, the gradients of one."""
    both = torch.cat([found for found, _, _ in slices], -1)
    assert error(both[..., :VOCAB], logits[..., :VOCAB]) < 1e-10
    for part in gradients:
        ((_, _, whole),) = gradients[part]
        total, times = torch.zeros_like(whole), torch.zeros_like(whole)
        for _, _, found in slices:
            for offsets, lengths, data in found[part]:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                total[box] += data
                times[box] += 1
        # What both ranks hold is equal on both, or two parts of a sum.
        close = min(
            error(total / times, whole, 1e-3 * largest), error(total, whole, 1e-3 * largest)
        )
        assert close < bound, (part, close)
