import pytest

from mcore_infer import SamplingConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 0}, "--num-tokens 0"),
        ({"temperature": 0.0}, "Use --top-k 1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"stop_words": ("a", "")}, "--stop-words has an empty word"),
    ],
)
def test_impossible_sampling_names_the_flag(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**fields)
