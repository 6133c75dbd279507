"""nccl's settings by axis: what a file says, and what is refused in it."""

import pytest

from mcore_parallel.launch.nccl_settings import Communicator, read_communicators

AXES = dict.fromkeys(("tp", "cp_dp", "expert_dp", "optimizer_shard", "expert_optimizer_shard"))


def read(tmp_path, text):
    file = tmp_path / "nccl.toml"
    file.write_text(text)
    return read_communicators(str(file), AXES)


def test_counts_reach_the_options_of_nccl(tmp_path):
    found = read(tmp_path, "[tp]\nmin_ctas = 4\nmax_ctas = 16\ncga_cluster_size = 2\n")
    config = found["tp"].options().config
    assert (config.min_ctas, config.max_ctas, config.cga_cluster_size) == (4, 16, 2)
    untouched = Communicator(max_ctas=8).options().config
    assert untouched.max_ctas == 8
    assert untouched.min_ctas == Communicator().options().config.min_ctas


def test_what_is_said_of_data_ranks_holds_for_the_shards_of_their_optimizer(tmp_path):
    assert read(tmp_path, "[dp_cp]\nmax_ctas = 8\n") == dict.fromkeys(
        ("cp_dp", "optimizer_shard"), Communicator(max_ctas=8)
    )
    own = read(tmp_path, "[optimizer_shard]\nmax_ctas = 4\n[dp_cp]\nmax_ctas = 8\n")
    assert own["optimizer_shard"] == Communicator(max_ctas=4)


def test_what_is_said_of_the_pipeline_holds_for_messages_both_ways(tmp_path):
    both = dict.fromkeys(("pp", "pp_back"), Communicator(max_ctas=8))
    assert read(tmp_path, "[pp]\nmax_ctas = 8\n") == both


def test_no_file_says_nothing():
    assert read_communicators("", AXES) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[dpp]\nmax_ctas = 8\n", "no axis dpp; use tp, cp_dp"),
        ("[tp]\nmax_cta = 8\n", "sets max_cta, which is unknown: use min_ctas, max_ctas"),
        ("[tp]\nmax_ctas = 0\n", "max_ctas = 0: it must be 1 or more"),
        ("[tp]\nmax_ctas = true\n", "max_ctas = True: it must be 1 or more"),
        ("[tp]\nmin_ctas = 9\nmax_ctas = 8\n", "min_ctas 9 above max_ctas 8"),
        ("tp = 8\n", "must be a table of min_ctas"),
        ("[tp", "is not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(ValueError, match="--nccl-communicator-config-path .*" + message):
        read(tmp_path, text)


def test_a_missing_file_is_refused():
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read: No such file"):
        read_communicators("nowhere.toml", AXES)
