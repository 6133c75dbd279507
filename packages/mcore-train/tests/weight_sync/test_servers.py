"""Pushes to servers that speak vLLM's and SGLang's protocols, as documented."""

import ctypes
import json
import pickle
import sys
import types
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from mcore_models.config import TransformerConfig, config_to_dict
from mcore_models.gpt import GPT
from mcore_models.peft.config import ADAPTER
from mcore_moe.config import MoEConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards
from mcore_train.weight_sync.broadcast import TorchGroup, pickled_unique_id
from mcore_train.weight_sync.hf_weights import HFWeights, combined_digest, save_weights_folder
from mcore_train.weight_sync.servers import join_sglang, join_vllm, load_weights_folder

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2
)


class FakeServer:
    """An HTTP server with one worker, which keeps what it is sent."""

    def __init__(self):
        self.calls, self.weights, self.group, self.fault = [], {}, None, ""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                path = self.path.partition("?")[0]
                fake.calls.append(self.path)
                if path == fake.fault:
                    self.send_error(500, "no memory left")
                    return
                answer = json.dumps(fake.answer(path, body)).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        Thread(target=self.http.serve_forever, daemon=True).start()

    def join(self, info):
        """As torch makes a group by name, which SGLang's workers call."""
        timeout = timedelta(seconds=10)
        rank, size = info["rank_offset"], info["world_size"]
        store = dist.TCPStore(info["master_address"], info["master_port"], size, False, timeout)
        name = "weight_update_group"
        store = dist.PrefixStore(name, store)
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group, _ = _new_process_group_helper(
            size, rank, [], "gloo", store, group_name=name, timeout=timeout
        )
        _world.pg_group_ranks[self.group] = {member: member for member in range(size)}

    def receive(self, count):
        content = torch.empty(count, dtype=torch.uint8)
        self.group.broadcast(content, 0).wait()
        return content


class FakeVLLM(FakeServer):
    def answer(self, path, body):
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            self.join(body["init_info"])
        if path == "/update_weights":
            info = body["update_info"]
            assert (info["packed"], info["packed_num_buffers"]) == (True, 1)
            waiting = []
            rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
            for number, (name, word, shape) in enumerate(rows):
                dtype = getattr(torch, word)
                waiting.append((name, dtype, shape, dtype.itemsize * torch.Size(shape).numel()))
                sizes = [size for *_, size in waiting]
                is_full = sum(sizes) > info["packed_buffer_size_bytes"]
                if is_full or number == len(rows) - 1:
                    for part, (key, kind, lengths, _) in zip(
                        self.receive(sum(sizes)).split(sizes), waiting, strict=True
                    ):
                        self.weights[key] = part.clone().view(kind).view(lengths)
                    waiting = []
        return {}


class FakeSGLang(FakeServer):
    def answer(self, path, body):
        if path == "/get_server_info":
            return {"tp_size": 1}
        if path == "/init_weights_update_group":
            assert body["backend"] == "gloo"
            self.join(body)
        if path == "/update_weights_from_disk":
            self.folder, self.version = body["model_path"], body["weight_version"]
            return {"success": self.version != "13", "message": "unlucky"}
        if path == "/update_weights_from_distributed":
            for name, word, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            ):
                dtype = getattr(torch, word)
                content = self.receive(dtype.itemsize * torch.Size(shape).numel())
                self.weights[name] = content.view(dtype).view(shape)
            self.version = body["weight_version"]
        return {"success": True}


@pytest.fixture
def model():
    return GPT(CONFIG, ParallelContext.single(), vocab_size=37, seed=5, dtype=torch.bfloat16)


def description():
    config, moe = config_to_dict(CONFIG), config_to_dict(MoEConfig())
    return {"family": "gpt", "vocab_size": 37, "config": config, "moe": moe}


def read(model):
    return {f"model.{name}": shard for name, shard in named_shards(model).items()}


@pytest.fixture
def weights(model):
    return HFWeights(partial(read, model), description(), SINGLE, bucket_bytes=2000)


@pytest.mark.parametrize(
    ("kind", "join", "before", "after"),
    [
        (FakeVLLM, join_vllm, ["/pause?mode=wait", "/start_weight_update"], "/resume"),
        (FakeSGLang, join_sglang, ["/pause_generation"], "/continue_generation"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_gets_the_bytes_and_is_paused_until_it_has_all(
    kind, join, before, after, weights, model
):
    fake = kind()
    where = {"address": "127.0.0.1", "port": 0, "join": TorchGroup}
    server = join(weights, fake.url, **where)
    begin = len(fake.calls)
    report = server.push(with_digest=True)
    assert fake.calls[begin : begin + len(before)] == before
    assert fake.calls[-1] == after
    sent = [(n, t.clone()) for bucket in weights.buckets() for n, t in bucket]
    assert fake.weights.keys() == {name for name, _ in sent}
    assert all(torch.equal(fake.weights[name], tensor) for name, tensor in sent)
    received = [(name, fake.weights[name]) for name, _ in sent]
    assert report.digest == combined_digest(0, received)
    assert (report.version, report.num_tensors) == (1, len(sent))
    assert report.num_bytes == sum(t.nbytes for _, t in sent)
    # A push that fails leaves the server paused; the next one lets it continue.
    with torch.no_grad():
        model.embedding.weight.add_(1)
    fake.fault = next(call for call in fake.calls if call.startswith("/update_weights"))
    with pytest.raises(RuntimeError, match="status 500"):
        server.push()
    assert fake.calls[-1] == fake.fault
    assert server.version == 1
    fake.fault = ""
    assert server.push(5).version == 5
    name = next(name for name in fake.weights if "embed" in name)
    assert torch.equal(fake.weights[name], model.embedding.weight[:37])
    assert fake.calls[-1] == after
    with pytest.raises(ValueError, match="push of version 5 after version 5"):
        server.push(5)
    server.close()
    dist.destroy_process_group(fake.group)


def test_a_server_that_refuses_the_group_is_reported_at_once(weights):
    fake = FakeVLLM()
    fake.fault = "/init_weight_transfer_engine"
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine: status 500"):
        join_vllm(weights, fake.url, address="127.0.0.1", port=0, join=TorchGroup)


def test_a_folder_is_loaded_by_sglang_and_old_versions_go(model, tmp_path):
    fake = FakeSGLang()
    for version in (1, 2, 13):
        folder = save_weights_folder(
            tmp_path, version, partial(read, model), description(), SINGLE, keep=2
        )
        assert (folder / "model.safetensors").is_file()
        if version < 13:
            load_weights_folder(fake.url, folder, version)
            assert (fake.folder, fake.version) == (str(folder), str(version))
    assert len(list(tmp_path.glob("*/config.json"))) == 2
    with pytest.raises(RuntimeError, match="unlucky"):
        load_weights_folder(fake.url, folder, 13)


def test_the_id_in_the_store_is_what_vllm_unpickles(monkeypatch):
    class ncclUniqueId(ctypes.Structure):  # noqa: N801 - vLLM's name
        _fields_ = [("internal", ctypes.c_byte * 128)]

    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    module = types.ModuleType(name)
    module.ncclUniqueId = ncclUniqueId
    for depth in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    content = bytes(range(100, 228))
    assert bytes(pickle.loads(pickled_unique_id(content)).internal) == content
    with pytest.raises(ValueError, match="128 bytes, not 3"):
        pickled_unique_id(b"abc")


def test_adapters_are_refused(model):
    shards = read(model)
    name = f"model.blocks.0.attention.q.{ADAPTER}.down.weight"
    shards[name] = next(iter(shards.values()))
    with pytest.raises(ValueError, match="Merge them"):
        HFWeights(lambda: shards, description(), SINGLE)
